#!/bin/sh
# torch 2.13.0, on a CPU: torch.cdist of rows with themselves
# Guess: a row's distance to itself is 0, or near 1e-6 of its length, however many rows there are
# Seen: of 25 rows it is 0; from 26 on cdist multiplies the rows, and of rows of length 800 it is above 0.1, unless compute_mode says otherwise
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch

torch.manual_seed(0)
rows = torch.randn(26, 64) + 100


def furthest(count, mode="use_mm_for_euclid_dist_if_necessary"):
    part = rows[:count]
    return torch.cdist(part, part, compute_mode=mode).diagonal().max().item()


seen = furthest(25), furthest(26), furthest(26, "donot_use_mm_for_euclid_dist")
print(torch.__version__, "largest distance of a row to itself, of 25 rows, 26 rows, 26 without products:", seen)
raise SystemExit(seen[0] != 0 or not 0.1 < seen[1] < 10 or seen[2] != 0)
PYTHON
