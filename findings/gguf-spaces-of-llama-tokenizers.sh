#!/bin/sh
# transformers 5.23.0 and llama.cpp (xllamacpp 2026.10.11549): GGUF's SentencePiece tables
# Guess: both give the same tokens
# Seen: llama.cpp writes a space before each text, one that begins with a space or stands behind a special token too; transformers does not
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.23.0 gguf==0.19.0 xllamacpp==2026.10.11549 torch==2.13.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import gguf
import numpy as np


def write(tables):
    """A GGUF file of a tiny random model with a tokenizer."""
    writer = gguf.GGUFWriter("model.gguf", "llama")
    for name, value in {
        "block_count": 1, "context_length": 512, "embedding_length": 32, "feed_forward_length": 32,
        "head_count": 1, "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 32, **tables,
    }.items():
        getattr(writer, f"add_{name}")(value)
    count, numbers = len(tables["token_list"]), np.random.default_rng(0)
    shapes = {"token_embd": (count, 32), "output_norm": (32,), "output": (count, 32), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {f"blk.0.{name}": (32, 32) for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", numbers.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_llama_cpp(texts):
    import json
    import random
    import urllib.request

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = "model.gguf", 256, False
    params.port = random.randint(20000, 60000)
    server = xllamacpp.Server(params)
    found = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(server.listening_address + "/tokenize", body, {"content-type": "application/json"})
        found.append(json.loads(urllib.request.urlopen(request).read())["tokens"])
    return found

import os
from importlib.metadata import version

import transformers
from transformers import AutoTokenizer

pieces = ["fi", "\u2581f", "\u2581fi", "\u2581\u2581", *"\u2581fi"]
tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *pieces]
write({
    "tokenizer_model": "llama", "tokenizer_pre": "default", "token_list": tokens,
    "token_types": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
    "token_scores": [0.0] * 259 + [-float(n) for n in range(len(pieces))],
    "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0,
})
texts = ["fi", " fi", "</s>fi", "  fi"]
cpp = by_llama_cpp(texts)
built = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
ours = [built.encode(text, add_special_tokens=False) for text in texts]
print("transformers", transformers.__version__, "xllamacpp", version("xllamacpp"))
for text, one, other in zip(texts, cpp, ours):
    print(repr(text), [tokens[n] for n in one], [tokens[n] for n in other], flush=True)
os._exit([one == other for one, other in zip(cpp, ours)] != [True, False, False, False])
PYTHON
