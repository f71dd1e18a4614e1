#!/bin/sh
# numba 0.68.1 with numpy 2.3.5: x.sum(), np.sum and x.mean() of float32 in a compiled function
# Guess: numpy's: added in pairs, 20 million ones are 20000000 and their mean is 1
# Seen: added one after the other in float32: 16777216, and a mean of 0.8388608; of ten million 0.1 the mean is 0.1088. An accumulator that begins as 0.0 is float64, and right
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q numba==0.68.1 numpy==2.3.5
cd "$work"
cat > sums.py <<'PYTHON'
import numba
import numpy as np


@numba.njit
def totals(x):
    total = 0.0
    for number in x:
        total += number
    return x.sum(), np.sum(x), x.mean(), total


ones, tenths = np.ones(20_000_000, np.float32), np.full(10_000_000, 0.1, np.float32)
seen = [float(number) for number in totals(ones)]
mean = round(float(totals(tenths)[2]), 4)
numpy_seen = [float(ones.sum()), float(ones.mean()), round(float(tenths.mean()), 4)]
print("numba", numba.__version__, "20M ones: x.sum(), np.sum, mean, a float64 loop:", seen, "numpy:", numpy_seen, "| mean of 10M times 0.1:", mean)
raise SystemExit(seen != [16777216.0, 16777216.0, 0.838860809803009, 2e7] or numpy_seen != [2e7, 1.0, 0.1] or mean != 0.1088)
PYTHON
"$work/venv/bin/python" sums.py
