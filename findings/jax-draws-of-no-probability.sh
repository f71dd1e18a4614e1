#!/bin/sh
# jax 0.10.2, numpy 2.3.5, on a CPU: more draws without replacement than there are tokens of a probability
# Guess: an error, or a mark, as numpy refuses it: two of four tokens have a probability, three are asked for
# Seen: jax draws tokens of probability 0, and logit -inf, behind the others, and in their order: a mask of a grammar, or top_k, is broken by whoever draws several drafts or beams of one row. Where all are 0 or -inf token 0 is drawn, and of a row with a NaN the NaN's token
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

key = jax.random.key(1)
weights = [0.0, 0.5, 0.0, 0.5]
seen = {
    "choice": jax.random.choice(key, 4, (3,), replace=False, p=jnp.array(weights)).tolist(),
    "categorical": jax.random.categorical(key, jnp.log(jnp.array(weights)), shape=(4,), replace=False).tolist(),
    "all 0": jax.random.choice(key, 4, (5,), p=jnp.zeros(4)).tolist(),
    "all -inf": jax.random.categorical(key, jnp.full(4, -jnp.inf), shape=(5,)).tolist(),
    "a NaN at 2": jax.random.categorical(key, jnp.zeros(4).at[2].set(jnp.nan), shape=(5,)).tolist(),
}
try:
    refused = str(np.random.default_rng(0).choice(4, 3, replace=False, p=weights))
except ValueError as error:
    refused = str(error)
print("jax", jax.__version__, seen, "| numpy:", refused)
ordered = sorted(seen["choice"][:2]) == [1, 3] and seen["choice"][2] in (0, 2) and sorted(seen["categorical"][:2]) == [1, 3] and sorted(seen["categorical"]) == [0, 1, 2, 3]
raise SystemExit(not ordered or seen["all 0"] != [0] * 5 or seen["all -inf"] != [0] * 5 or seen["a NaN at 2"] != [2] * 5 or "non-zero" not in refused)
PYTHON
