#!/bin/sh
# llama.cpp (xllamacpp 2026.10.11549): logprobs of its server's /v1/completions, beside stop strings and characters of two tokens
# Guess: an entry for each token made, under the token's own text; the same in a stream and in one piece
# Seen: an entry is under the text that was given out at its step: of an answer "abcd" with stop=["abx"] they are "", "", "abc", "d" and an end, so "c" bears the name "abc"; of a character of two byte tokens the first has none; with stop=["cd"] a stream has two empty ones more than the whole answer. They have the form of a chat's (content), not that of completions (tokens, token_logprobs)
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import os
import random
import urllib.request
from importlib.metadata import version

import gguf
import numpy as np
import xllamacpp

NAMES = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
NUMBERS = {name: number for number, name in enumerate(NAMES)}
FOLLOWS = {"x": {"a": 12}, "a": {"b": 12}, "b": {"c": 12}, "c": {"d": 12}, "d": {"</s>": 12}, "y": {"<0xC3>": 12}, "<0xC3>": {"<0xA9>": 12}, "<0xA9>": {"d": 12}}  # logits; others have 0
WIDTH = 288
fields = {
    "block_count": 1, "context_length": 512, "embedding_length": WIDTH, "feed_forward_length": 32, "head_count": 4, "head_count_kv": 4,
    "layer_norm_rms_eps": 1e-6, "rope_dimension_count": 72, "tokenizer_model": "llama", "tokenizer_pre": "default",
    "token_list": NAMES, "token_types": [2, 3, 3] + [6] * 256 + [1] * 27, "token_scores": [0.0] * len(NAMES), "bos_token_id": 1,
    "eos_token_id": 2, "unk_token_id": 0, "add_bos_token": False, "add_space_prefix": False,
}
writer = gguf.GGUFWriter("model.gguf", "llama")
for name, value in fields.items():
    getattr(writer, f"add_{name}")(value)
embedding, head = np.eye(len(NAMES), WIDTH, dtype=np.float32), np.zeros((len(NAMES), WIDTH), np.float32)
for one, row in FOLLOWS.items():  # logits are a table: the layer adds nothing, and each token is a direction of its own
    for other, logit in row.items():
        head[NUMBERS[other], NUMBERS[one]] = logit / WIDTH**0.5
tensors = {"token_embd": embedding, "output": head, "output_norm": np.ones(WIDTH, np.float32)}
tensors |= {f"blk.0.{name}_norm": np.ones(WIDTH, np.float32) for name in ("attn", "ffn")}
tensors |= {f"blk.0.attn_{name}": np.zeros((WIDTH, WIDTH), np.float32) for name in ("q", "k", "v", "output")}
tensors |= {f"blk.0.ffn_{name}": np.zeros((32, WIDTH), np.float32) for name in ("gate", "up")}
tensors["blk.0.ffn_down"] = np.zeros((WIDTH, 32), np.float32)
for name, tensor in tensors.items():
    writer.add_tensor(f"{name}.weight", tensor)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.port = "model.gguf", 512, 2, False, random.randint(20000, 60000)
server = xllamacpp.Server(params)


def ask(path="/v1/completions", **settings):
    body = json.dumps({"prompt": "x", "max_tokens": 8, "temperature": 0, **settings}).encode()
    request = urllib.request.Request(server.listening_address + path, body, {"content-type": "application/json"})
    return urllib.request.urlopen(request).read().decode()


def names(**settings):
    """Names of the entries of one answer, and of the same answer in a stream."""
    whole = json.loads(ask(logprobs=1, **settings))["choices"][0]["logprobs"]
    lines = ask(logprobs=1, stream=True, **settings).splitlines()
    pieces = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
    entries = [entry for choices in pieces if choices and choices[0]["logprobs"] for entry in choices[0]["logprobs"]["content"]]
    return list(whole), [entry["token"] for entry in whole["content"]], [entry["token"] for entry in entries]


seen = {"abx": names(stop=["abx"]), "cd": names(stop=["cd"]), "two bytes": names(prompt="y")}
print("xllamacpp", version("xllamacpp"))
for name, (form, whole, stream) in seen.items():
    print(name, form, "whole:", whole, "stream:", stream, flush=True)
halves = ["\u00e9", "d", ""]
wanted = {"abx": (["content"], ["", "", "abc", "d", ""], ["", "", "abc", "d", ""]), "cd": (["content"], ["a", "b"], ["a", "b", "", ""])}
os._exit(seen != wanted | {"two bytes": (["content"], halves, halves)})
PYTHON
