#!/bin/sh
# safetensors 0.8.0: safetensors.numpy.save of arrays that do not lie in order
# Guess: copied into order, or refused as safetensors.torch.save refuses them
# Seen: their memory is written as it lies: a transposed array comes back scrambled, and of every second element the first half of all; nothing is said
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q safetensors==0.8.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from safetensors.numpy import load, save

numbers = np.arange(6)
arrays = {"transposed": numbers.reshape(2, 3).T, "every second": np.arange(10)[::2], "big-endian": numbers.astype(">i8")}
seen = {}
for name, array in arrays.items():
    back = load(save({"a": array}))["a"]
    seen[name] = np.array_equal(back, array)
    print(version("safetensors"), name, array.tolist(), "->", back.tolist())
raise SystemExit(seen != {"transposed": False, "every second": False, "big-endian": True})
PYTHON
