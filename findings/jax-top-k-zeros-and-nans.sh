#!/bin/sh
# jax 0.10.2, on a CPU: jax.lax.top_k of zeros and of NaN
# Guess: of equal numbers the first one, as its docstring says ("the lower-index element appears first") and as argmax does; a NaN is the largest, as in jnp.sort
# Seen: 0 comes before -0, which is equal to it: top_k([-0, 0], 1) is 1, where argmax is 0, so greedy tokens differ where logits were multiplied by 0 or rounded to it from below; a NaN whose sign is set, which is what 0 / 0 is on many processors, is the smallest, and jnp.nan the largest; jnp.sort and jnp.argsort put both last, and take 0 and -0 for equal
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.10.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

zeros = jnp.array([-0.0, 0.0, -1.0])
nan = jnp.array([1.0, jnp.nan, 3.0])
signed = jnp.array([1.0, -jnp.nan, 3.0])


def first(x, count=1):
    return jax.lax.top_k(x, count)[1].tolist()


seen = {
    "-0, 0": (first(zeros), int(zeros.argmax()), jnp.argsort(zeros, descending=True).tolist()),
    "rounded to zero from below, and zero": first(jnp.array([-1e-9, 0.0]).astype("float16")),
    "NaN": (first(nan), int(nan.argmax()), jnp.argsort(nan).tolist()),
    "-NaN": (first(signed, 3), int(signed.argmax()), jnp.argsort(signed).tolist()),
    "equal": first(jnp.ones(5), 3),
}
print("jax", jax.__version__, "top_k, argmax, argsort:", seen)
wanted = {"-0, 0": ([1], 0, [0, 1, 2]), "rounded to zero from below, and zero": [1], "NaN": ([1], 1, [0, 2, 1]), "-NaN": ([2, 0, 1], 1, [0, 2, 1]), "equal": [0, 1, 2]}
raise SystemExit(seen != wanted)
PYTHON
