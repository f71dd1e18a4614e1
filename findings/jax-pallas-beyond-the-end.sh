#!/bin/sh
# jax 0.10.2, on a CPU: pallas_call(interpret=True) past the end of an array
# Guess: what lies beyond the end is read as 0, or as NaN everywhere, and an output begins with zeros
# Seen: the rest of a last block is NaN (integers: the smallest); a block or a pl.ds that begins too late, or before 0, is moved to the last place where it fits, so it reads other numbers; an output begins with NaN, and adding into it stays NaN
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.10.2
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import os

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def copy(x, out):
    out[...] = x[...]


def part(x, start, out):
    out[...] = x[pl.ds(start[0], 4)]


def add(x, out):
    out[...] += x[...]


def blocks(kernel, x, place, grid=1, size=4):
    specs = {"in_specs": [pl.BlockSpec((size,), lambda i: (i + place,))], "out_specs": pl.BlockSpec((size,), lambda i: (0,))}
    return pl.pallas_call(kernel, grid=(grid,), out_shape=jax.ShapeDtypeStruct((size,), x.dtype), interpret=True, **specs)(x)


def slices(start):
    call = pl.pallas_call(part, out_shape=jax.ShapeDtypeStruct((4,), jnp.float32), interpret=True)
    return call(jnp.arange(8.0), jnp.array([start])).tolist()


last = [blocks(copy, jnp.arange(5, dtype=kind), 1).tolist() for kind in (jnp.float32, jnp.int32)]
late = blocks(copy, jnp.arange(8.0), 5).tolist()
moved = [slices(start) for start in (3, 6, -10)]
total = blocks(add, jnp.ones(4), 0, grid=4, size=1).tolist()
print(jax.__version__, "last block of 5:", last, "| block 5 of two:", late, "| 4 from 3, 6 and -10 on:", moved, "| 1 + 1 + 1 + 1:", total)
is_nan = [x != x for x in last[0]] == [False, True, True, True] and total[0] != total[0]
raise SystemExit(not is_nan or last[1] != [4, *[-(2**31)] * 3] or late != [4, 5, 6, 7] or moved != [[3, 4, 5, 6], [4, 5, 6, 7], [0, 1, 2, 3]])
PYTHON
