#!/bin/sh
# mlx 0.32.4, on a CPU: arange and cumsum in bfloat16 and float16
# Guess: as torch: each place of an arange is its number, rounded (999 is 1000 in bfloat16), and a cumsum is kept in float32 and rounded once
# Seen: both add one after the other in the type itself: in bfloat16 arange(1000) ends in 256, 256, 256 and a cumsum of 1000 ones at 256; in float16 they end at 2048. So positions made in the model's type stand still. A sum of the same ones is 1000; arange in float32, cast afterwards, is right
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'mlx[cpu]==0.32.4'
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import mlx.core as mx

seen = {}
for kind, count in ((mx.bfloat16, 1000), (mx.float16, 4000)):
    places, ones = mx.arange(0, count, dtype=kind), mx.ones(count, kind)
    cast = mx.arange(0, count, dtype=mx.float32).astype(kind)
    seen[str(kind)] = places[-3:].tolist(), mx.cumsum(ones)[-1].item(), mx.sum(ones).item(), cast[-1].item()
print("mlx", version("mlx"), "arange's last, cumsum's, the sum of ones, arange cast afterwards:", seen)
wanted = {
    "mlx.core.bfloat16": ([256.0] * 3, 256.0, 1000.0, 1000.0), "mlx.core.float16": ([2048.0] * 3, 2048.0, 4000.0, 4000.0),
}
raise SystemExit(seen != wanted)
PYTHON
