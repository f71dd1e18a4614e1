#!/bin/sh
# onnxruntime-genai 0.18.0, on a CPU: the end token in get_sequence, get_next_tokens and token_count
# Guess: every row ends with its end token, as those of transformers' generate; or none has it
# Seen: rows that end while others go on have it, and padding behind it; the row or rows that end last have none, nor does a row alone, though get_next_tokens gave it; token_count leaves it out. Where the padding is the end token, the number of them in a row tells nothing
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q onnxruntime-genai==0.18.0 onnxruntime==1.31.1 onnx==1.23.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import os

import numpy as np
import onnx
import onnxruntime_genai
from onnx import TensorProto, helper, numpy_helper

table = np.zeros((16, 16), np.float32)  # logits of a token behind a token: 2, 3, 4, 5 and the end, 1
for one, other in ((2, 3), (3, 4), (4, 5), (5, 1)):
    table[one, other] = 9


def value(name, kind, *shape):
    return helper.make_tensor_value_info(name, kind, shape)


past = [value(f"past_key_values.0.{name}", TensorProto.FLOAT, "b", 1, "p", 8) for name in ("key", "value")]
present = [value(f"present.0.{name}", TensorProto.FLOAT, "b", 1, "t", 8) for name in ("key", "value")]
nodes = [
    helper.make_node("Gather", ["table", "input_ids"], ["logits"], axis=0),
    helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
    helper.make_node("Unsqueeze", ["numbers", "axes"], ["column"]),
    helper.make_node("Tile", ["column", "times"], ["entries"]),
]
nodes += [helper.make_node("Concat", [one.name, "entries"], [other.name], axis=2) for one, other in zip(past, present)]
constants = [(table, "table"), (np.array([1, 3]), "axes"), (np.array([1, 1, 1, 8]), "times")]
inputs = [value("input_ids", TensorProto.INT64, "b", "s"), value("attention_mask", TensorProto.INT64, "b", "t"), *past]
outputs = [value("logits", TensorProto.FLOAT, "b", "s", 16), *present]
graph = helper.make_graph(nodes, "table", inputs, outputs, [numpy_helper.from_array(*each) for each in constants])
os.mkdir("model")
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "model/model.onnx")
decoder = {
    "filename": "model.onnx", "head_size": 8, "hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1,
    "session_options": {"provider_options": []},
    "inputs": {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"},
    "outputs": {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"},
}
settings = {"type": "llama", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": 16, "context_length": 64}
with open("model/genai_config.json", "w") as file:
    json.dump({"model": {**settings, "decoder": decoder}, "search": {"max_length": 32, "do_sample": False}}, file)
model = onnxruntime_genai.Model("model")


def run(*prompts):
    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(batch_size=len(prompts), max_length=32)
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens(np.array(prompts, dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    last = generator.get_next_tokens().tolist()
    return [generator.get_sequence(row).tolist() for row in range(len(prompts))], last, generator.token_count()


seen = {"alone": run([2]), "two": run([2], [5]), "the same twice": run([2], [2])}
print("onnxruntime-genai", onnxruntime_genai.__version__, "rows, last tokens, token_count:", seen)
whole = [2, 3, 4, 5]
wanted = {"alone": ([whole], [1], 4), "two": ([whole, [5, 1, 0, 0]], [1, 0], 4), "the same twice": ([whole, whole], [1, 1], 4)}
raise SystemExit(seen != wanted)
PYTHON
