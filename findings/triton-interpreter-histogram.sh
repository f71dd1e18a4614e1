#!/bin/sh
# Triton 3.7.1, TRITON_INTERPRET=1: tl.histogram of numbers beyond the last bin
# Guess: with 4 bins a 4 is dropped, as a 5 is
# Seen: a 4 is counted among the 3s, since numpy's last bin has both its ends; 5 and -1 are dropped
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1 torch==2.13.0 numpy==2.3.5
cd "$work"
cat > counts.py <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def counts(x, out, size: tl.constexpr, bins: tl.constexpr):
    tl.store(out + tl.arange(0, bins), tl.histogram(tl.load(x + tl.arange(0, size)), bins))


seen = []
for numbers in ([0, 1, 2, 3], [4, 4, 4, 4], [5, 5, -1, -1]):
    out = torch.zeros(4, dtype=torch.int32)
    counts[(1,)](torch.tensor(numbers, dtype=torch.int32), out, 4, 4)
    seen.append(out.tolist())
    print(triton.__version__, numbers, "->", out.tolist())
raise SystemExit(seen != [[1, 1, 1, 1], [0, 0, 0, 4], [0, 0, 0, 0]])
PYTHON
TRITON_INTERPRET=1 "$work/venv/bin/python" counts.py
