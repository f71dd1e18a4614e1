#!/bin/sh
# mlx 0.32.4, on a CPU: mx.quantize(mode="nvfp4") of weights of several sizes
# Guess: a format of floats: weights a thousand times smaller come back with the same relative error, as in mxfp4
# Seen: without `global_scale`, which is None, the scale of a block is its largest number / 6 in e4m3, whose least number is 2^-9: of a block whose largest number is below 0.0058 all is 0, random weights of size 0.005 lose 0.14 of their norm, those of 0.002 nearly all, and beyond 2688 = 6 * 448 all is cut off. With global_scale = the largest number of the whole the error is 0.09 for every size. The docstring of mx.quantize says that there is one, and not that it is needed
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'mlx[cpu]==0.32.4' numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
weights = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)


def error(size, mode, **more):
    numbers = mx.array(weights * size)
    parts = mx.quantize(numbers, mode=mode, **more)
    back = mx.dequantize(*parts, mode=mode, dtype=mx.float32, **more)
    return round((mx.linalg.norm(back - numbers) / mx.linalg.norm(numbers)).item(), 2)


sizes = [1e4, 1.0, 0.005, 0.002, 0.001]
seen = {}
for mode in ("mxfp4", "nvfp4"):
    seen[mode] = [error(size, mode) for size in sizes]
seen["nvfp4 with global_scale"] = [error(size, "nvfp4", global_scale=mx.array(float(np.abs(weights).max() * size))) for size in sizes]
print("mlx", version("mlx"), "weights of size", sizes, "relative error", seen)
wanted = {"mxfp4": [0.12] * 5, "nvfp4": [0.8, 0.09, 0.14, 0.95, 1.0], "nvfp4 with global_scale": [0.09] * 5}
raise SystemExit(seen != wanted)
PYTHON
