#!/bin/sh
# numcodecs 0.16.6, numpy 2.3.5: BitRound of NaN and of the largest numbers
# Guess: a NaN stays NaN, and the largest float16 stays finite or is refused: the filter drops bits of the mantissa
# Seen: it adds half of the last kept bit to the bits as a whole number, and looks at nothing else: the NaN 0x7fffffff, which CUDA devices write, becomes -0, 0xffffffff becomes 0, and 65504 in float16 inf. numpy's nan (0x7fc00000) stays NaN, so a test with it sees nothing. numcodecs/bitround.py
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q numcodecs==0.16.6 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import numcodecs
import numpy as np
from numcodecs import BitRound

bits = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32)
codec = BitRound(keepbits=7)
single = np.asarray(codec.decode(codec.encode(bits.view(np.float32)))).view(np.float32)
codec = BitRound(keepbits=3)
half = np.asarray(codec.decode(codec.encode(np.array([65504, 1.03], np.float16)))).view(np.float16)
print("numcodecs", numcodecs.__version__, [hex(word) for word in bits], "->", single.tolist(), "| 65504 and 1.03 in float16 ->", half.tolist())
raise SystemExit(not np.isnan(single[0]) or single[1:3].tolist() != [0, 0] or np.signbit(single[1:3]).tolist() != [True, False] or not np.isinf(single[3]) or half.tolist() != [float("inf"), 1.0])
PYTHON
