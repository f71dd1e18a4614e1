#!/bin/sh
# mlx 0.32.4, on a CPU: mean and softmax of float16, cumsum of bfloat16
# Guess: sums inside them are kept in float32, as torch and numpy keep those of a mean and a softmax
# Seen: they are kept in the type of the numbers: the mean of 100 times 1000 is inf, a cumsum of bfloat16 ones ends at 256, and a softmax over 70,000 equal float16 logits sums to 34; precise=True mends the softmax
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'mlx[cpu]==0.32.4'
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import mlx.core as mx
from importlib.metadata import version

mx.set_default_device(mx.cpu)
mean = mx.mean(mx.full((100,), 1000.0, dtype=mx.float16)).item()
ends = mx.cumsum(mx.full((1000,), 1.0, dtype=mx.bfloat16))[-1].item()
logits = mx.zeros((70_000,), dtype=mx.float16)
totals = [mx.sum(mx.softmax(logits, precise=p).astype(mx.float32)).item() for p in (False, True)]
print(version("mlx"), "mean of 100 times 1000:", mean, "| cumsum of 1000 ones:", ends, "| softmax sums to", totals)
raise SystemExit(mean != float("inf") or ends != 256 or totals[0] < 2 or abs(totals[1] - 1) > 0.01)
PYTHON
