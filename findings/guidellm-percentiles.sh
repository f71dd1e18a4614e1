#!/bin/sh
# guidellm 0.8.1 (torch 2.13.0) beside numpy 2.3.5: percentiles of its summaries
# Guess: numpy's (which vLLM's benchmark takes): between two numbers, so the median of 1, 2, 3 and 4 is 2.5
# Seen: a number that was measured, the lower one: the median of 1 to 4 is 2, of 1 and 2 it is 1, and the 99th of few is the largest; the mean is 2.5 in both. Medians of the same few requests differ by a whole step from a benchmark that interpolates
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 guidellm==0.8.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from guidellm.schemas import DistributionSummary

seen = {}
for numbers in ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0], [float(n) for n in range(1, 101)]):
    summary = DistributionSummary.from_values(numbers)
    found = [summary.median, summary.percentiles.p25, summary.percentiles.p99]
    seen[len(numbers)] = found, [round(float(np.percentile(numbers, q)), 2) for q in (50, 25, 99)], summary.mean == np.mean(numbers)
print("guidellm", version("guidellm"), "numpy", np.__version__, "by count, the 50th, 25th and 99th of each, the same mean:", seen)
wanted = {
    4: ([2.0, 1.0, 4.0], [2.5, 1.75, 3.97], True), 2: ([1.0, 1.0, 2.0], [1.5, 1.25, 1.99], True),
    100: ([50.0, 25.0, 99.0], [50.5, 25.75, 99.01], True),
}
raise SystemExit(seen != wanted)
PYTHON
