#!/bin/sh
# llama.cpp (xllamacpp 2026.10.11549): pre-tokenizers tekken and gpt-4o
# Guess: words are those of the pattern that the model was trained with
# Seen: combining marks are cut off their letters (Hindi, decomposed accents); the model's pattern keeps them in the word
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q gguf==0.19.0 xllamacpp==2026.10.11549 tokenizers==0.23.3 regex==2026.9.3
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

import regex
from tokenizers import pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
pairs = ["\u00cc \u0123", "e \u00cc\u0123"]  # U+0301, and e with it
tokens = ["<s>", "</s>", *letters, *("".join(pair.split()) for pair in pairs)]
write({
    "tokenizer_model": "gpt2", "tokenizer_pre": "tekken", "token_list": tokens,
    "token_types": [3, 3] + [1] * (len(tokens) - 2), "token_merges": pairs,
    "bos_token_id": 0, "eos_token_id": 1, "add_bos_token": False,
})
upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
own = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*|\p{{N}}"  # how tekken_240911.json of mistral-common begins
text = "e\u0301te\u0301"
words = regex.findall(own, text)
(found,) = by_llama_cpp([text])
print("xllamacpp", version("xllamacpp"), [tokens[n] for n in found], "words by the model's pattern:", len(words), flush=True)
os._exit(not (len(words) == 1 and len(found) == 5))
PYTHON
