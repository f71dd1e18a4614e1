#!/bin/sh
# optimum-quanto 0.2.7, torch 2.13.0: quantize(model, weights=qint4), whose groups are of 128
# Guess: a matrix of 192 or 1000 columns has groups of 128 and a last one that is shorter, or is refused
# Seen: 192 columns are two groups of 96, 160 are five of 32; 1000 have no groups at all: one scale for the whole row, and nothing says so. 128 and below: one for the row. optimum/quanto/nn/qmodule.py tries 128, 96, 64 and 32, and takes none of them if none divides
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 optimum-quanto==0.2.7 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from optimum.quanto import freeze, qint4, quantize

seen = {}
for columns in (256, 192, 160, 1000, 2880, 11008):
    model = torch.nn.Sequential(torch.nn.Linear(columns, 8, bias=False))
    quantize(model, weights=qint4)
    freeze(model)
    seen[columns] = columns * 8 // model.state_dict()["0.weight._scale"].numel()
print("optimum-quanto", version("optimum-quanto"), "numbers under one scale, by columns:", seen)
raise SystemExit(seen != {256: 128, 192: 96, 160: 32, 1000: 1000, 2880: 96, 11008: 128})
PYTHON
