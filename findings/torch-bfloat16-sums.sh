#!/bin/sh
# torch 2.13.0, CPU: adding 512 times 2^-9 to 1 in bfloat16, by seven functions
# Guess: all of them add in float32 and round once (2), or the scattering ones round each time (1)
# Seen: index_add is 1 for a tensor of one dimension and 2 for one of two; index_put(accumulate) is always 1; scatter_add, cumsum, sum and dot are 2
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch

x = torch.full((513,), 2.0**-9, dtype=torch.bfloat16)
x[0] = 1
at, zero, rows = torch.zeros(513, dtype=torch.int64), torch.zeros(1, dtype=x.dtype), x[:, None]
seen = {
    "index_add": zero.index_add(0, at, x),
    "index_add of rows": zero[:, None].index_add(0, at, rows),
    "index_put of rows": zero[:, None].clone().index_put_((at,), rows, accumulate=True),
    "scatter_add": zero.scatter_add(0, at, x),
    "cumsum": x.cumsum(0)[-1],
    "sum": x.sum(),
    "dot": x @ torch.ones_like(x),
}
seen = {name: value.item() for name, value in seen.items()}
print(torch.__version__, seen)
raise SystemExit(list(seen.values()) != [1, 2, 1, 2, 2, 2, 2])
PYTHON
