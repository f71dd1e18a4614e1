#!/bin/sh
# mlx 0.32.4, on a CPU: argmax less one, and int64 with uint64
# Guess: as numpy and torch: argmax is int64, and the place before the first is -1; int64 with uint64 keeps small whole numbers
# Seen: argmax, argmin and argsort are uint32, and a Python int takes that type: 0 - 1 is 4294967295, and -1 compared with it is not smaller than 0; no index is checked, so x[argmax - 1] is not the last one. int64 with uint64 is float32: 16777217 comes back as 16777216 (numpy: float64)
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'mlx[cpu]==0.32.4'
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import mlx.core as mx

place = mx.argmax(mx.array([3.0, 1.0]))
before = place - 1
kinds = [str(x.dtype) for x in (place, mx.argmin(place), mx.argsort(mx.array([3.0, 1.0])), mx.random.categorical(mx.zeros((1, 2))))]
total = mx.array([16777217], mx.int64) + mx.array([0], mx.uint64)
small = mx.array([1], mx.int32) + mx.array([1], mx.uint32)
print("mlx", version("mlx"), "argmax - 1:", before.item(), "below 0:", (before < 0).item(), kinds, "| int64 + uint64:", total.dtype, int(total.item()), "| int32 + uint32:", small.dtype)
wrong = before.item() != 4294967295 or (before < 0).item() or set(kinds) != {"mlx.core.uint32"}
raise SystemExit(wrong or total.dtype != mx.float32 or int(total.item()) != 16777216 or small.dtype != mx.int64)
PYTHON
