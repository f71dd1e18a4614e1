#!/bin/sh
# ctranslate2 4.8.5, on a CPU: what of a prompt counts in Generator.generate_batch
# Guess: the prompt is of the text so far: repetition_penalty and no_repeat_ngram_size look at it, and suppress_sequences=[["b", "c"]] forbids c behind a prompt that ends in b; max_length counts new tokens, and include_prompt_in_result changes what is returned alone
# Seen: the three do not look at it, though the docstring says that a prompt is generated under constraint; max_length counts it, all but its first token, unless include_prompt_in_result is False: of 4 prompt tokens max_length=3 makes nothing new
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q ctranslate2==4.8.5 numpy==2.3.5 setuptools==80.9.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import os

import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

NAMES = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "0", "1", "2"]
NUMBERS = {name: number for number, name in enumerate(NAMES)}
FOLLOWS = {"x": {"a": 12, "b": 11}, "a": {"b": 12}, "b": {"c": 12}, "c": {"d": 12}, "d": {"</s>": 12}}  # logits; others have 0
FOLLOWS |= {"j": {"k": 12, "l": 11}, "k": {"j": 12, "m": 11}, "l": {"j": 12, "n": 11}}
spec = transformer_spec.TransformerDecoderModelSpec.from_config(
    1, 1, activation=common_spec.Activation.SWISH, rms_norm=True, ffn_glu=True, rotary_dim=0, num_heads_kv=1, rotary_interleave=False
)
head = np.zeros((32, 32), np.float32)  # logits are a table: the layer adds nothing, and each token is a direction of its own
for one, row in FOLLOWS.items():
    for other, logit in row.items():
        head[NUMBERS[other], NUMBERS[one]] = logit / 32**0.5
decoder, layer = spec.decoder, spec.decoder.layer[0]
decoder.embeddings.weight, decoder.scale_embeddings, decoder.projection.weight = np.eye(32, dtype=np.float32), False, head
for norm in (decoder.layer_norm, layer.self_attention.layer_norm, layer.ffn.layer_norm):
    norm.gamma = np.ones(32, np.float32)
layer.self_attention.linear[0].weight = np.zeros((96, 32), np.float32)
for linear in (layer.self_attention.linear[1], layer.ffn.linear_0, layer.ffn.linear_0_noact, layer.ffn.linear_1):
    linear.weight = np.zeros((32, 32), np.float32)
spec.register_vocabulary(NAMES)
spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<s>", "</s>", "<unk>"
spec.validate()
os.mkdir("model")
spec.save("model")
generator = ctranslate2.Generator("model", device="cpu")


def text(prompt, length, **settings):
    """New tokens alone, and with the prompt in the result."""
    results = [generator.generate_batch([list(prompt)], max_length=length, include_prompt_in_result=each, **settings) for each in (False, True)]
    return tuple("".join(result[0].sequences[0]) for result in results)


seen = {
    "penalty": text("ax", 4, repetition_penalty=1.5)[0],
    "penalty of what is new": text("j", 3, repetition_penalty=1.5)[0],
    "pairs": text("jkj", 3, no_repeat_ngram_size=2)[0],
    "pairs of what is new": text("j", 4, no_repeat_ngram_size=2)[0],
    "suppressed": text("b", 4, suppress_sequences=[["b", "c"]])[0],
    "suppressed in what is new": text("a", 4, suppress_sequences=[["b", "c"]])[0][:2],
    "length 3": (text("xx", 3), text("xxxx", 3)),
}
print("ctranslate2", ctranslate2.__version__, seen)
wanted = {"penalty": "abcd", "penalty of what is new": "kjl", "pairs": "kjk", "pairs of what is new": "kjkm", "suppressed": "cd", "length 3": (("abc", "xxab"), ("abc", "xxxx"))}
raise SystemExit(any(seen[name] != value for name, value in wanted.items()) or seen["suppressed in what is new"] == "bc")
PYTHON
