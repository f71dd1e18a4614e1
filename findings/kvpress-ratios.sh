#!/bin/sh
# kvpress 0.5.5: how many entries compression_ratio leaves
# Guess: 0.9 leaves 10 of 100 entries, 0.8 leaves 2 of 10
# Seen: 9, and 1: they are int(n * (1 - ratio)), and 100 * (1 - 0.9) is 9.999999999999998
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 kvpress==0.5.5 transformers==5.2.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from kvpress import KnormPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)).eval()
seen = {}
for length, ratio in ((100, 0.9), (100, 0.8), (1000, 0.9), (10, 0.8), (100, 0.5)):
    cache = DynamicCache()
    with torch.no_grad(), KnormPress(ratio)(model):
        model(torch.arange(length)[None] % 64, past_key_values=cache)
    seen[length, ratio] = cache.get_seq_length()
print(version("kvpress"), "entries left of (length, ratio):", seen)
raise SystemExit(list(seen.values()) != [9, 19, 99, 1, 50])
PYTHON
