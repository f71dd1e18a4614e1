#!/bin/sh
# llama.cpp (xllamacpp 2026.10.11549): what its server counts: max_tokens=0, usage with n=2, presence_penalty and logprobs of a chat
# Guess: max_tokens=0 makes no token; usage is the sum of both answers; presence_penalty counts the answer's tokens (as vLLM); logprobs=true without top_logprobs lists no others (as OpenAI)
# Seen: max_tokens=0 makes one; completion_tokens is that of the first answer; the penalty counts the last 64 tokens, the prompt's with them: behind "ax" comes b, behind a and 64 others a; the chat lists 20
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
FOLLOWS = {"x": {"a": 12, "b": 11, "c": 10}, "a": {"b": 12}, "b": {"c": 12}, "c": {"d": 12}, "d": {"</s>": 12}}  # logits; others have 0
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


def complete(**settings):
    answer = json.loads(ask(**settings))
    return [choice["text"] for choice in answer["choices"]], answer["usage"]["completion_tokens"]


none = complete(max_tokens=0)
alone = complete(n=1, max_tokens=3)
both = complete(n=2, max_tokens=3)
prompts = ("x", "ax", "a" + "x" * 64)
penalised = {prompt[:3]: complete(prompt=prompt, max_tokens=1, presence_penalty=1.5)[0] for prompt in prompts}
chat = json.loads(ask("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=1, logprobs=True))
listed = len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"])
print("xllamacpp", version("xllamacpp"), "max_tokens=0:", none, "| n=1:", alone, "n=2:", both, "| penalised:", penalised, "| listed:", listed, flush=True)
same = none == (["a"], 1) and alone == (["abc"], 3) and both == (["abc", "abc"], 3)
os._exit(not same or penalised != {"x": ["a"], "ax": ["b"], "axx": ["a"]} or listed != 20)
PYTHON
