#!/bin/sh
# gguf 0.19.0: quantize and dequantize of Q4_0 and Q5_0
# Guess: symmetric: the scale is the largest magnitude / 7, levels are -7 to 7, and numbers 2i and 2i + 1 share byte i
# Seen: the scale is the number of the largest magnitude, with its sign, / -8, so it is negative where that number is positive, and the number is exact; one as large of the other sign comes back an eighth smaller, in Q5_0 a sixteenth: a block of 1 and -1 as 1 and -0.875, one of -1 and 1 as -1 and 0.875, the first of the two being the largest. Byte i holds numbers i (lower half) and i + 16. ggml/src/ggml-quants.c, quantize_row_q4_0_ref; gguf/quants.py, Q4_0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q gguf==0.19.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize


def block(kind, *numbers):
    row = np.zeros((1, 32), np.float32)
    row[0, : len(numbers)] = numbers
    packed = quantize(row, kind)
    return packed[0, :2].view(np.float16)[0].item(), dequantize(packed, kind)[0, : len(numbers)].tolist()


four, five = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q5_0
seen = [block(four, 1.0, -1.0), block(four, -1.0, 1.0), block(five, 1.0, -1.0), block(four, 0.5, -1.0)]
count = np.arange(32, dtype=np.float32)[None] % 16 - 8
count[0, 16:] = -8
nibbles = [[byte & 15, byte >> 4] for byte in quantize(count, four)[0, 2:].tolist()]
print("gguf", version("gguf"), "scale and numbers of (1, -1), (-1, 1), (1, -1) in Q5_0, (.5, -1):", seen, "| halves of the 16 bytes of -8 to 7, 16 times -8:", nibbles)
wanted = [(-0.125, [1.0, -0.875]), (0.125, [-1.0, 0.875]), (-0.0625, [1.0, -0.9375]), (0.125, [0.5, -1.0])]
raise SystemExit(seen != wanted or nibbles != [[level, 0] for level in range(16)])
PYTHON
