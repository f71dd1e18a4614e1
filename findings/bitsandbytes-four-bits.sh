#!/bin/sh
# bitsandbytes 0.50.2, on a CPU: what 4 and 8 bits hold
# Guess: FP4 is E2M1 (0, 1/12, 1/6, 1/4, 1/3, 1/2, 2/3, 1 of the largest); blocks of 64 begin anew with each row; the first of two numbers is in the lower half of a byte; 8 bits hold -1 as they hold 1
# Seen: the least number of FP4 is 1/192; blocks run on from row to row, so that of rows of 96 the second begins within a block; the first number is in the upper half; of 8 bits -1 comes back as -0.993, and 1 as 1
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 bitsandbytes==0.50.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise, quantize_4bit, quantize_blockwise

least = torch.zeros(64)
least[:3] = torch.tensor([1.0, 0.08, 0.002])
packed, state = quantize_4bit(least, blocksize=64, quant_type="fp4")
table = sorted(round(192 * x.item()) for x in state.code[:8])
rows = torch.full((2, 96), 0.01)
rows[0, 95] = 100.0
widened = dequantize_4bit(*quantize_4bit(rows, blocksize=64, quant_type="nf4"))
lost = [int((row == 0).sum()) for row in widened]
pair = torch.zeros(64)
pair[:2] = torch.tensor([1.0, -1.0])
byte = quantize_4bit(pair, blocksize=64, quant_type="nf4")[0].flatten()[0].item()
ends = [round(x, 4) for x in dequantize_blockwise(*quantize_blockwise(torch.tensor([-1.0, 1.0]))).tolist()]
print(version("bitsandbytes"), "FP4 times 192:", table, "| small numbers lost beside a large one in row 0:", lost, "| 1, -1 in a byte of NF4:", hex(byte), "| -1 and 1 in 8 bits:", ends)
raise SystemExit(table != [0, 1, 32, 48, 64, 96, 128, 192] or lost != [31, 32] or byte != 0xF0 or ends != [-0.993, 1.0])
PYTHON
