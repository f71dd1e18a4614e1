#!/bin/sh
# ml_dtypes 0.6.0 with numpy 2.3.5: sum, mean and @ of bfloat16 and int4
# Guess: as numpy's own small types: float16 is added in pairs (1000 ones are 1000, and mean adds in float32), int8 in int64
# Seen: 1000 ones in bfloat16 sum to 256 and have a mean of 0.256, since each addition is rounded (8 bits hold no 257); in float8_e4m3fn they are 16. Ten ones in int4 are -6, their mean is 0: sums stay int4. A matrix product of bfloat16 is 1000, a sum down the columns 256. The types' own loops: ml_dtypes/_src/ufuncs.h
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q ml_dtypes==0.6.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

kinds = (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
seen = {}
for kind in kinds:
    ones = np.ones(1000, kind)
    seen[kind.__name__] = float(ones.sum()), float(ones.mean())
row = np.ones((1, 1000), ml_dtypes.bfloat16)
product, columns = float((row @ row.T)[0, 0]), float(row.T.sum(axis=0)[0])
for kind in (np.int8, ml_dtypes.int4, ml_dtypes.int2):
    ones = np.ones(10, kind)
    seen[kind.__name__] = int(ones.sum()), float(ones.mean())
print("ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__, "sum, mean of 1000 or 10 ones:", seen, "| bfloat16 @:", product, "down a column:", columns)
wanted = {
    "float16": (1000.0, 1.0), "bfloat16": (256.0, 0.255859375), "float8_e4m3fn": (16.0, 0.015625),
    "int8": (10, 1.0), "int4": (-6, 0.0), "int2": (-2, 0.0),
}
raise SystemExit(seen != wanted or (product, columns) != (1000.0, 256.0))
PYTHON
