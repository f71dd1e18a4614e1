#!/bin/sh
# jax 0.10.2, on a CPU: astype of what an integer type does not hold
# Guess: one rule for a number beyond the range: it wraps, as numpy and torch do (300 is 44 in int8)
# Seen: a float stops at the end (300 is 127 in int8, -1 is 0 in uint8, 1e10 is 2147483647 in int32) and NaN is 0; an int32 wraps (300 is 44). So a quantiser without a clip is right in jax alone, and one that casts to int32 on its way is wrong there too
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.10.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import os

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp

floats = jnp.array([300.0, -300.0, -1.0, float("nan"), 1e10])
seen = {kind.__name__: floats.astype(kind).tolist() for kind in (jnp.int8, jnp.uint8, jnp.int32)}
whole = jnp.array([300, -300]).astype(jnp.int8).tolist()
on_the_way = floats[:2].astype(jnp.int32).astype(jnp.int8).tolist()
compiled = jax.jit(lambda x: x.astype(jnp.int8))(floats).tolist()
print("jax", jax.__version__, "of 300, -300, -1, NaN and 1e10:", seen, "compiled:", compiled, "| int32 300 and -300 to int8:", whole, on_the_way)
wanted = {"int8": [127, -128, -1, 0, 127], "uint8": [255, 0, 0, 0, 255], "int32": [300, -300, -1, 0, 2**31 - 1]}
raise SystemExit(seen != wanted or compiled != wanted["int8"] or [whole, on_the_way] != [[44, -44]] * 2)
PYTHON
