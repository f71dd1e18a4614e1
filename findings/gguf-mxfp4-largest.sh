#!/bin/sh
# gguf 0.19.0: quantize to MXFP4, and back
# Guess: a block's scale is made for its largest number, which is off by half a step at most
# Seen: the scale is the power of two below it, less two, so that numbers from 6 to 8 steps are cut to 6: the largest of a block comes back up to a quarter smaller (7.99 -> 6), and 5 becomes 4
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q gguf==0.19.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from gguf import GGMLQuantizationType, dequantize, quantize

kind, seen = GGMLQuantizationType.MXFP4, {}
for largest in (7.99, 6.1, 5.0, 4.9, 1.999):
    block = np.zeros((1, 32), np.float32)
    block[0, 0] = largest
    seen[largest] = float(dequantize(quantize(block, kind), kind)[0, 0])
print(version("gguf"), seen)
raise SystemExit(list(seen.values()) != [6, 6, 4, 4, 1.5])
PYTHON
