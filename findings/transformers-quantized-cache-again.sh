#!/bin/sh
# transformers 5.23.0, hqq 0.2.8.post1, torch 2.13.0, on a CPU: QuantizedCache with backend "hqq", 4 bits
# Guess: an entry is quantised once, when it leaves the residual of the last tokens, as in KIVI, whose paper the docstring cites; so its error stays
# Seen: whenever the residual is full, all entries are read back and quantised again with the new ones: 16, 32, 48 ... tokens. Along axis 0, which is what axis_key and axis_value are unless given, groups take other members in as the cache grows, and the error of the first 16 entries trebles in 176 tokens (.09 to .26); along axis 1 it stays .09. transformers/cache_utils.py, QuantizedLayer.update
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 hqq==0.2.8.post1 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import transformers
from transformers import LlamaConfig, QuantizedCache

config = LlamaConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
torch.manual_seed(0)
entries = torch.randn(1, 2, 200, 64)
first = entries[:, :, :16]


def run(axis):
    cache = QuantizedCache("hqq", config, nbits=4, axis_key=axis, axis_value=axis, q_group_size=64, residual_length=16)
    layer = cache.layers[0]
    quantize, lengths, errors = layer._quantize, [], []

    def counted(entries, axis):
        lengths.append(entries.shape[-2])
        return quantize(entries, axis)

    layer._quantize = counted
    cache.update(first, first, 0)
    for at in range(16, 193):
        held, _ = cache.update(entries[:, :, at : at + 1], entries[:, :, at : at + 1], 0)
        if at % 88 == 16:
            errors.append(round(((held[:, :, :16] - first).norm() / first.norm()).item(), 2))
    return lengths[::2], errors


seen = {axis: run(axis) for axis in (0, 1)}
for axis, (lengths, errors) in seen.items():
    print("transformers", transformers.__version__, "axis", axis, "tokens quantised:", lengths, "| error of the first 16 behind 16, 104, 192 tokens:", errors)
each = list(range(16, 193, 16))
(lengths, errors), (others, steady) = seen.values()
raise SystemExit(lengths != each or others != each or errors[2] < 2.5 * errors[0] or max(steady) > 1.1 * min(steady))
PYTHON
