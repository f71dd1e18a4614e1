#!/bin/sh
# ml_dtypes 0.6.0, numpy 2.3.5: sorting numbers of bfloat16 and float8 that have a NaN among them
# Guess: as numpy sorts float16 and float32: in order, the NaN last; argpartition finds the smallest
# Seen: the NaN stays where it is and what lies on both sides is not put in order: [3, nan, 1, 2] becomes [3, nan, 1, 2], and the smallest by argpartition is 3
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q ml_dtypes==0.6.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import ml_dtypes
import numpy as np

numbers = [3.0, np.nan, 1.0, 2.0]
seen = {}
for kind in (np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    array = np.array(numbers, kind)
    order = np.sort(array).astype(np.float32).tolist(), np.argsort(array).tolist()
    seen[np.dtype(kind).name] = str(order), float(array[np.argpartition(array, 0)[0]])
    print(version("ml_dtypes"), np.__version__, np.dtype(kind).name, numbers, *seen[np.dtype(kind).name])
right, wrong = ("([1.0, 2.0, 3.0, nan], [2, 3, 0, 1])", 1.0), ("([3.0, nan, 1.0, 2.0], [0, 1, 2, 3])", 3.0)
raise SystemExit(list(seen.values()) != [right, right, wrong, wrong])
PYTHON
