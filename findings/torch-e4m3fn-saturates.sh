#!/bin/sh
# torch 2.13.0, CPU: what a cast to each 8-bit float makes of numbers that are too large
# Guess: all four are cut to their largest number or all become infinite or NaN; inf itself is no number of e4m3fn and becomes NaN
# Seen: e4m3fn is cut to 448, and inf too, so that an overflow before the cast leaves no trace; e5m2 becomes inf, and both fnuz types NaN
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch

kinds = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
seen = {}
for kind in kinds:
    numbers = torch.tensor([1e5, -1e5, torch.inf, torch.nan])
    seen[kind] = [str(x) for x in numbers.to(kind).float().tolist()]
    print(torch.__version__, kind, seen[kind])
wanted = [["448.0", "-448.0", "448.0", "nan"], ["inf", "-inf", "inf", "nan"], *[["nan"] * 4] * 2]
raise SystemExit(list(seen.values()) != wanted)
PYTHON
