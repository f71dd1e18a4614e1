#!/bin/sh
# taichi 1.7.4, kernels on a CPU: whether a number is NaN
# Guess: x != x says so, as in Python, C and CUDA, and max(x, 1) is NaN or, as C's fmax, 1 in one order
# Seen: x != x is false for NaN, also with `ti.init(fast_math=False)`, which makes x == x false as well: != is not what == is not. ti.math.isnan says it; max and min drop it in either order. An assignment keeps the first type: v = 0, then v = 2.9, is 2
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q taichi==1.7.4 numpy==2.3.5
cd "$work"
cat > nan.py <<'PYTHON'
import sys

import numpy as np
import taichi as ti

ti.init(arch=ti.cpu, log_level=ti.ERROR, fast_math=sys.argv[1] == "fast", offline_cache=False)


@ti.kernel
def ask(x: ti.f32, out: ti.types.ndarray(dtype=ti.f32)):
    out[0] = ti.cast(x != x, ti.f32)
    out[1] = ti.cast(x == x, ti.f32)
    out[2] = ti.cast(ti.math.isnan(x), ti.f32)
    out[3] = ti.max(x, 1.0)
    out[4] = ti.max(1.0, x)
    v = 0
    v = 2.9
    out[5] = v


out = np.zeros(6, np.float32)
ask(float("nan"), out)
print(ti.__version__, sys.argv[1], "x != x, x == x, isnan(x), max(x, 1), max(1, x), v:", out.tolist())
raise SystemExit(out.tolist()[:3] != ([0, 1, 1] if sys.argv[1] == "fast" else [0, 0, 1]) or out.tolist()[3:] != [1, 1, 2])
PYTHON
"$work/venv/bin/python" nan.py fast
"$work/venv/bin/python" nan.py exact
