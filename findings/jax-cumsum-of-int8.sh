#!/bin/sh
# jax 0.10.2, on a CPU: sums of int8 and uint8 (numpy 2.3.5 beside it)
# Guess: one rule: cumsum and segment_sum widen as sum does, to int32, where numpy has int64
# Seen: sum, prod and trace are int32 (uint32 of uint8), and cumsum, cumprod and segment_sum stay int8: the last of a cumsum of 200 ones is -56, of 300 uint8 ones 44, three times 100 in one segment are 44; dot and einsum wrap too. A cumsum of bools is int32. With dtype=int32 a cumsum is right
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
import numpy as np

ones, unsigned, hundreds = jnp.ones(200, jnp.int8), jnp.ones(300, jnp.uint8), jnp.full(3, 100, jnp.int8)
found = {
    "sum": ones.sum(), "prod": hundreds.prod(), "cumsum": jnp.cumsum(ones)[-1], "cumsum of uint8": jnp.cumsum(unsigned)[-1],
    "cumprod": jnp.cumprod(hundreds)[-1], "segment_sum": jax.ops.segment_sum(hundreds, jnp.zeros(3, jnp.int32), 1)[0],
    "cumsum of bools": jnp.cumsum(unsigned > 0)[-1], "cumsum, int32": jnp.cumsum(ones, dtype=jnp.int32)[-1], "dot": jnp.dot(hundreds, hundreds),
}
seen = {name: (str(value.dtype), int(value)) for name, value in found.items()}
print("jax", jax.__version__, seen, "| numpy's cumsum:", np.cumsum(np.ones(200, np.int8))[-1])
wanted = {
    "sum": ("int32", 200), "prod": ("int32", 1000000), "cumsum": ("int8", -56), "cumsum of uint8": ("uint8", 44), "cumprod": ("int8", 64),
    "segment_sum": ("int8", 44), "cumsum of bools": ("int32", 300), "cumsum, int32": ("int32", 200), "dot": ("int8", 48),
}
raise SystemExit(seen != wanted)
PYTHON
