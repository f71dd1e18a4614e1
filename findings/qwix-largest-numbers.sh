#!/bin/sh
# qwix 0.1.8 (jax 0.10.2, on a CPU): symmetric int8 and int4 of its default calibration, absmax
# Guess: the scale is the largest number / 127 (/ 7), or / 128 (/ 8) with the sign, so that the largest number comes back as it was
# Seen: it is / 127.5 and / 7.5: 1 and -1 come back as 0.996 in int8 and as 0.933 in int4, 7 % smaller, and -8 and -128 are never used; float8 has the largest number / 448, and keeps it. qwix/_src/core/numerics.py, get_symmetric_bound
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q qwix==0.1.8 jax==0.10.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import os
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
import jax.numpy as jnp
import qwix

weights = jnp.array([[1.0, -1.0, 0.5, 0.25]])
seen = {}
for kind in (jnp.int8, jnp.int4, jnp.float8_e4m3fn):
    made = qwix.quantize(weights, kind, channelwise_axes=(0,))
    seen[kind.__name__] = [int(n) for n in made.qvalue[0]], round(1 / float(made.scale[0, 0]), 3), [round(float(n), 3) for n in qwix.dequantize(made)[0]]
print("qwix", version("qwix"), "whole numbers, 1 / scale and what comes back of 1, -1, 0.5 and 0.25:", seen)
wanted = {
    "int8": ([127, -127, 64, 32], 127.5, [0.996, -0.996, 0.502, 0.251]), "int4": ([7, -7, 4, 2], 7.5, [0.933, -0.933, 0.533, 0.267]),
    "float8_e4m3fn": ([448, -448, 224, 112], 448.0, [1.0, -1.0, 0.5, 0.25]),
}
raise SystemExit(seen != wanted)
PYTHON
