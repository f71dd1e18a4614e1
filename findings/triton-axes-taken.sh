#!/bin/sh
# Triton 3.7.1, TRITON_INTERPRET=1: the axis that tl.softmax, tl.cumsum and tl.sort of a matrix take by themselves
# Guess: one for all of them, and the last for a softmax
# Seen: tl.softmax and tl.cumsum go down the columns, so the rows of a softmax do not sum to 1; tl.sort goes along the rows
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1 torch==2.13.0 numpy==2.3.5
cd "$work"
cat > axes.py <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def three(x, out, size: tl.constexpr):
    at = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    matrix = tl.load(x + at)
    tl.store(out + at, tl.softmax(matrix))
    tl.store(out + size * size + at, tl.cumsum(matrix))
    tl.store(out + 2 * size * size + at, tl.sort(matrix))


x = torch.tensor([[3.0, 1, 2, 0], [0, 5, 1, 2], [1, 1, 0, 4], [2, 0, 6, 1]])
out = torch.zeros(3, 4, 4)
three[(1,)](x, out, 4)
along = {"softmax": lambda axis: x.softmax(axis), "cumsum": lambda axis: x.cumsum(axis), "sort": lambda axis: x.sort(axis).values}
seen = {name: [axis for axis in (0, 1) if torch.allclose(got, by(axis))] for got, (name, by) in zip(out, along.items())}
print(triton.__version__, "axis taken:", seen, "| rows of the softmax sum to", [round(x, 3) for x in out[0].sum(1).tolist()])
raise SystemExit(seen != {"softmax": [0], "cumsum": [0], "sort": [1]})
PYTHON
TRITON_INTERPRET=1 "$work/venv/bin/python" axes.py
