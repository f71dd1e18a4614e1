#!/bin/sh
# prometheus-client 0.26.0: one NaN among the observations of a histogram, and among a counter's increments
# Guess: refused as negative increments are, or counted in the bucket +Inf
# Seen: taken without a word: the sum is NaN for good, while no bucket and so not the count has seen it; a counter becomes NaN for good
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q prometheus-client==0.26.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

registry = CollectorRegistry()
histogram = Histogram("seconds", "s", buckets=(1.0,), registry=registry)
counter = Counter("tokens", "t", registry=registry)
for value in (0.5, float("nan"), 2.0):
    histogram.observe(value)
    counter.inc(value)
lines = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#" and "_created" not in line]
seen = dict(line.split() for line in lines)
print(version("prometheus-client"), seen)
wanted = {'seconds_bucket{le="1.0"}': "1.0", 'seconds_bucket{le="+Inf"}': "2.0", "seconds_count": "2.0"}
raise SystemExit(seen != {**wanted, "seconds_sum": "NaN", "tokens_total": "NaN"})
PYTHON
