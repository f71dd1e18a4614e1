#!/bin/sh
# torch 2.13.0, CPU: float8_e8m0fnu, the type of MX scales
# Guess: a negative number has no scale and becomes NaN; 3e38 the largest scale; zeros() are no zeros
# Seen: the sign is dropped (-3 -> 4); 3e38 becomes NaN; zeros() are 2^-127, and equal to 0 all the same
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch

kind = torch.float8_e8m0fnu
numbers = [1.49, 1.5, -3.0, 0.0, 3e38]
cast = [str(x) for x in torch.tensor(numbers).to(kind).float().tolist()]
zeros = torch.zeros(1, dtype=kind)
same = bool(zeros == 0), zeros.float().item() == 0
print(torch.__version__, dict(zip(numbers, cast)), "zeros() equal 0, and as float32:", same)
tiny = str(2.0**-127)
raise SystemExit(cast != ["1.0", "2.0", "4.0", tiny, "nan"] or same != (True, False))
PYTHON
