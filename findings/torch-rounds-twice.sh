#!/bin/sh
# torch 2.13.0, CPU: float64 and int64 cast to bfloat16, float16 and e4m3fn
# Guess: rounded once, to the nearest
# Seen: float64 becomes float32 first, and so do integers: what is just above the middle of two numbers becomes the middle, and then the even one, which is the wrong one (17 + 2^-40 -> 16, although 18 is nearer)
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch

cases = [
    (torch.tensor([17 + 2.0**-40], dtype=torch.float64), torch.float8_e4m3fn, 16.0, 18.0),
    (torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64), torch.bfloat16, 1.0, 1 + 2.0**-7),
    (torch.tensor([1 + 2.0**-11 + 2.0**-40], dtype=torch.float64), torch.float16, 1.0, 1 + 2.0**-10),
    (torch.tensor([2**33 + 2**25 + 1]), torch.bfloat16, 2.0**33, 2.0**33 + 2.0**26),
]
wrong = []
for number, kind, seen, nearest in cases:
    found = number.to(kind).double().item()
    exact = number.item()
    assert abs(exact - nearest) < abs(exact - seen)
    wrong.append(found == seen)
    print(torch.__version__, number.dtype, "->", kind, repr(exact), "->", found, "nearest:", nearest)
raise SystemExit(not all(wrong))
PYTHON
