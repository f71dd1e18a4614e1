#!/bin/sh
# torch 2.13.0, jax 0.10.2, numpy 2.3.5, on a CPU: seeds of 64 bits
# Guess: two seeds are two streams of numbers: manual_seed says -2^63 to 2^64 - 1, and initial_seed gives the whole number back
# Seen: torch's generator on a CPU takes the lower 32 bits: 1, 2^32 + 1 and 2^33 + 1 draw the same, and so do -1, 2^63 - 1 and 2^64 - 1. So seeds made by a hash collide, and seeds of which a request's number is the upper half are all one seed. jax.random.key does the same, unless jax_enable_x64 is set; numpy's are all different
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 jax==0.10.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import jax
import numpy as np
import torch

seeds = [1, 2**32 + 1, 2**33 + 1]
generator = torch.Generator()


def by_torch(seed):
    return torch.rand(4, generator=generator.manual_seed(seed)).tolist()


found = {
    "torch": [by_torch(seed) for seed in seeds],
    "torch, -1": [by_torch(seed) for seed in (-1, 2**63 - 1, 2**64 - 1)],
    "jax": [jax.random.uniform(jax.random.key(seed), 4).tolist() for seed in seeds],
    "numpy": [np.random.default_rng(seed).random(4).tolist() for seed in seeds],
}
streams = {name: len({tuple(numbers) for numbers in rows}) for name, rows in found.items()}
kept = generator.manual_seed(2**32 + 1).initial_seed()
print("torch", torch.__version__, "jax", jax.__version__, "streams of three seeds:", streams, "| initial_seed:", kept)
raise SystemExit(list(streams.values()) != [1, 1, 1, 3] or kept != 2**32 + 1)
PYTHON
