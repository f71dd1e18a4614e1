#!/bin/sh
# bitsandbytes 0.50.2, torch 2.13.0, on a CPU: quantize_blockwise with the map it takes unless told otherwise
# Guess: the map is symmetric, as int8's is: the largest number of a block comes back as it was, of either sign
# Seen: it ends at 1 and at -0.99296875: a block whose largest number is -3 comes back as -2.979, one with 3 as 3, so what was symmetric has a mean above 0. create_dynamic_map: 256 places, one of them 0, and one more above it than below
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 bitsandbytes==0.50.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import bitsandbytes
import bitsandbytes.functional as functional
import torch

seen = {}
for largest in (3.0, -3.0):
    block = torch.zeros(256)
    block[0], block[1] = largest, -largest / 2
    packed, state = functional.quantize_blockwise(block)
    seen[largest] = [round(number, 4) for number in functional.dequantize_blockwise(packed, state)[:2].tolist()]
places = functional.create_dynamic_map()
counts = int((places > 0).sum()), int((places < 0).sum()), int((places == 0).sum())
print("bitsandbytes", bitsandbytes.__version__, "of (largest, - largest / 2):", seen, "| the map's ends:", places.min().item(), places.max().item(), "above, below, at 0:", counts)
same = seen[3.0][0] == 3.0 and seen[-3.0][0] == -2.9789
raise SystemExit(not same or places.min().item() != -0.992968738079071 or places.max().item() != 1.0 or counts != (128, 127, 1))
PYTHON
