#!/bin/sh
# llama.cpp (xllamacpp 2026.10.11549): chat templates, which its own engine renders, beside Jinja2 3.1.6
# Guess: the same text, in all that chat templates use
# Seen: an emoji has length 4 (bytes), 7 % -3 is 1, none and lists show as nothing and as their parts run together, upper leaves é, default('d') replaces none, and 1.0 becomes 1 under tojson
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0 jinja2==3.1.6 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import os
import random
import urllib.request
from importlib.metadata import version

import gguf
import jinja2
import numpy as np
import xllamacpp

MARK = "\u241f"
expressions = [
    "'\U0001f600'|length", "7 % -3", "'a' ~ none ~ true", "[1, none, 'a']", "{'a': 1}.items()|list",
    "'\u00e9'|upper", "none|default('d')", "{'b': 1.0, 'a': 2}|tojson", "'ab'|upper", "[1, 2]|length",
]
template = MARK.join("{{ %s }}" % each for each in expressions)
environment = jinja2.Environment()
environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
by_jinja = environment.from_string(template).render(messages=[]).split(MARK)

writer = gguf.GGUFWriter("model.gguf", "llama")
tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581"]
fields = {
    "block_count": 1, "context_length": 512, "embedding_length": 32, "feed_forward_length": 32, "head_count": 1,
    "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 32, "tokenizer_model": "llama",
    "tokenizer_pre": "default", "token_list": tokens, "token_types": [2, 3, 3] + [6] * 256 + [1],
    "token_scores": [0.0] * len(tokens), "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0,
}
for name, value in fields.items():
    getattr(writer, f"add_{name}")(value)
numbers, count = np.random.default_rng(0), len(tokens)
shapes = {"token_embd": (count, 32), "output_norm": (32,), "output": (count, 32)}
shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
matrices = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
shapes |= {f"blk.0.{name}": (32, 32) for name in matrices}
for name, shape in shapes.items():
    writer.add_tensor(f"{name}.weight", numbers.standard_normal(shape).astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.warmup = "model.gguf", 256, False
params.use_jinja, params.chat_template, params.port = True, template, random.randint(20000, 60000)
server = xllamacpp.Server(params)
body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
request = urllib.request.Request(server.listening_address + "/apply-template", body, {"content-type": "application/json"})
by_llama = json.loads(urllib.request.urlopen(request).read())["prompt"].split(MARK)
print("xllamacpp", version("xllamacpp"), "Jinja2", version("jinja2"))
for each, one, other in zip(expressions, by_jinja, by_llama):
    print(ascii(each), "Jinja2:", ascii(one), "llama.cpp:", ascii(other), flush=True)
wanted = ["4", "1", "aTrue", "1a", "a1", "\u00e9", "d", '{"b": 1, "a": 2}', "AB", "2"]
os._exit(by_llama != wanted or by_jinja[:3] != ["1", "-2", "aNoneTrue"])
PYTHON
