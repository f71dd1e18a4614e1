#!/bin/sh
# rwkv 0.8.32, on a CPU: PIPELINE.sample_logits and its top_p, top_k and temperature
# Guess: top_p=1 cuts nothing; temperature comes before top_p, as in transformers and most servers; temperature=0 is argmax
# Seen: top_p=1 is greedy wherever the float32 probabilities add up to less than 1, which is about every second row of random logits: nothing reaches 1, so the first number is taken for the cut. top_p and top_k cut the plain probabilities, and temperature changes what is left: of .5, .3, .15, .05 at temperature 2 top_p=.7 leaves two tokens, not three. Equal logits are all kept at temperature=0, and the last of them at top_k=1. rwkv/utils.py
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 rwkv==0.8.32 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import torch
from rwkv.utils import PIPELINE

draw = PIPELINE.__new__(PIPELINE).sample_logits
np.random.seed(0)
rows = torch.tensor(np.random.default_rng(0).normal(size=(200, 1000)), dtype=torch.float32)
drawn = [{draw(row, top_p=1.0) for _ in range(10)} for row in rows]
greedy = [row for row, tokens in zip(rows, drawn) if tokens == {int(row.argmax())}]
below = sum(np.cumsum(np.sort(row.softmax(0).numpy())[::-1])[-1] < 1 for row in greedy)


def tokens(weights, **settings):
    return sorted({draw(torch.tensor(weights).log(), **settings) for _ in range(300)})


seen = {
    "temperature 2, top_p .7": tokens([0.5, 0.3, 0.15, 0.05], temperature=2.0, top_p=0.7),
    "temperature 0 of equal logits": tokens([0.25] * 4, temperature=0),
    "top_k 1 of equal logits": tokens([0.25] * 4, top_p=1.0, top_k=1),
}
print("rwkv", version("rwkv"), "greedy at top_p=1:", len(greedy), "of 200 rows, with a sum below 1:", below, "|", seen)
raise SystemExit(not 40 < len(greedy) < 160 or below != len(greedy) or list(seen.values()) != [[0, 1], [0, 1, 2, 3], [3]])
PYTHON
