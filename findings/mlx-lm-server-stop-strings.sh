#!/bin/sh
# mlx-lm 0.32.2 with mlx 0.32.4, on a CPU: stop strings of its server
# Guess: an answer "abcd" with stop=["ab"] ends before "ab", with no text
# Seen: where the answer is written as a, b, c, d and the tokenizer has a token "ab", it goes on to its end, and "ab" is taken out of its text: "cd". Stops are looked for as tokens (make_stop_sequences), and cut out as text (make_text_state_machine; generate.py). "bc", which is no token, stops
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.23.0 tokenizers==0.23.3 safetensors==0.8.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

NAMES = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "ab", "<unk>", "0", "1"]
NUMBERS = {name: number for number, name in enumerate(NAMES)}
FOLLOWS = {"x": {"a": 12}, "a": {"b": 12}, "b": {"c": 12}, "c": {"d": 12}, "d": {"</s>": 12}}  # logits; others have 0
tokenizer = Tokenizer(models.BPE(vocab=NUMBERS, merges=[("a", "b")], unk_token="<unk>"))
tokenizer.decoder = decoders.Fuse()
os.mkdir("model")
tokenizer.save("model/tokenizer.json")
special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
config = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": 32, "eos_token_id": 1,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False,
}
for name, value in (("tokenizer_config", special), ("config", config)):
    with open(f"model/{name}.json", "w") as file:
        json.dump(value, file)
head = np.zeros((32, 32), np.float32)  # logits are a table: the layer adds nothing, and each token is a direction of its own
for one, row in FOLLOWS.items():
    for other, logit in row.items():
        head[NUMBERS[other], NUMBERS[one]] = logit / 32**0.5
weights = {"model.embed_tokens.weight": np.eye(32, dtype=np.float32), "lm_head.weight": head, "model.norm.weight": np.ones(32, np.float32)}
for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"):
    weights[f"model.layers.0.{name}_proj.weight"] = np.zeros((32, 32), np.float32)
for name in ("input", "post_attention"):
    weights[f"model.layers.0.{name}_layernorm.weight"] = np.ones(32, np.float32)
save_file(weights, "model/model.safetensors", {"format": "mlx"})
port = random.randint(20000, 60000)
server = subprocess.Popen([sys.executable, "-m", "mlx_lm", "server", "--model", "model", "--port", str(port)], stderr=subprocess.DEVNULL)


def ask(**settings):
    body = json.dumps({"prompt": "x", "max_tokens": 8, "temperature": 0, **settings}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"})
    for _ in range(120):
        try:
            return urllib.request.urlopen(request).read().decode()
        except ConnectionError:
            time.sleep(1)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
            time.sleep(1)
    raise SystemExit("no answer")


seen = {}
try:
    for stop in (None, ["bc"], ["ab"]):
        answer = json.loads(ask(stop=stop))
        seen[str(stop)] = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
finally:
    server.terminate()
print("mlx-lm", version("mlx-lm"), "text and tokens, by stop:", seen)
raise SystemExit(seen != {"None": ("abcd", 5), "['bc']": ("a", 3), "['ab']": ("cd", 5)})
PYTHON
