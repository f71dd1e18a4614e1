#!/bin/sh
# jax 0.10.2, on a CPU: jax.random.categorical of logits in bfloat16 and float16
# Guess: the distribution that the logits say, as in float32: of 1000 equal logits the mean of the drawn numbers is 499.5
# Seen: its Gumbel noise has the type of the logits. In bfloat16 it has few large values, so the largest is there many times, and argmax takes the first: the mean is 129; in float16 it is 415. Logits of a model in bfloat16, sampled as they are, favour small token numbers; logits.astype(float32) is right. mode="high" mends it too; the docstring speaks of float32 alone, and of events rarer than 1e-7
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

seen = {}
for kind in (jnp.float32, jnp.bfloat16, jnp.float16):
    for mode in ("low", "high"):
        drawn = np.asarray(jax.random.categorical(jax.random.key(1), jnp.zeros((4000, 1000), kind), mode=mode), np.float64)
        seen[kind.__name__, mode] = round(drawn.mean()), round(float(np.median(drawn)))
print("jax", jax.__version__, "4000 draws of 1000 equal logits, mean and median:", seen)
right, wrong = seen["float32", "low"], seen["bfloat16", "low"]
raise SystemExit(abs(right[0] - 500) > 15 or wrong[0] > 200 or wrong[1] > 150 or not 350 < seen["float16", "low"][0] < 460 or abs(seen["bfloat16", "high"][0] - 500) > 15)
PYTHON
