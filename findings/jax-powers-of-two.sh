#!/bin/sh
# jax 0.10.2, on a CPU: jnp.log2 and jnp.exp2 of powers of two in float32
# Guess: exact, as C's are: floor(log2(x)) is the exponent that a scale of MXFP4 or FP8 is made of
# Seen: both go by the natural logarithm: log2(8192) is 12.999999, whose floor is 12, and so it is for other powers, always of large numbers; exp2 of a whole number is no power of two for most. jnp.frexp and jnp.ldexp are exact for normal numbers; below them jnp.ldexp gives 0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.10.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

exponents = np.arange(-126, 128)
powers = np.ldexp(np.float32(1), exponents)
logarithms = np.asarray(jnp.log2(jnp.asarray(powers)))
floors = exponents[np.floor(logarithms) != exponents].tolist()
raised = exponents[np.asarray(jnp.exp2(jnp.asarray(exponents, jnp.float32))) != powers].tolist()
exact = np.array_equal(np.asarray(jnp.frexp(jnp.asarray(powers))[1]) - 1, exponents) and np.array_equal(np.asarray(jnp.ldexp(jnp.float32(1), jnp.asarray(exponents))), powers)
print("jax", jax.__version__, "| exponents k where floor(log2(2**k)) is not k:", floors, "| where exp2(k) is not 2**k:", len(raised), "of", len(exponents), "| frexp and ldexp exact:", exact, "| ldexp(1, -140):", float(jnp.ldexp(jnp.float32(1), -140)))
raise SystemExit(not floors or min(floors) < 2 or len(raised) < 100 or not exact)
PYTHON
