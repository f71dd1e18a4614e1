#!/bin/sh
# hqq 0.2.8.post1: how numbers of 4 and 3 bits lie, and which are a group
# Guess: two neighbours of a row share a byte, the first in the lower half; a group is 64 neighbours of a row
# Seen: row r shares bytes with row r + half of the rows, and is in the upper half; of 3 bits rows r, r + n, r + 2n, ... share an int32, from its upper end on; Quantizer.quantize takes axis=0, whose groups are every k-th number of the whole matrix, where BaseQuantizeConfig takes axis=1
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 hqq==0.2.8.post1 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import inspect
from importlib.metadata import version

import torch
from hqq.core.quantize import BaseQuantizeConfig, Quantizer


def quantize(weight, bits, axis):
    return Quantizer.quantize(weight, nbits=bits, group_size=64, axis=axis, optimize=False, device="cpu", compute_dtype=torch.float32)


def rows(levels, largest):
    """A row of 64 for each level, whose scale is 1: its first numbers are 0 and the largest level."""
    weight = torch.tensor(levels, dtype=torch.float32)[:, None].repeat(1, 64)
    weight[:, 0], weight[:, 1] = 0, largest
    return weight


four = [hex(byte) for byte in quantize(rows(list(range(8)), 15), 4, 1)[0][:, 2].tolist()]
words = quantize(rows([n // 3 for n in range(20)], 7), 3, 1)[0][:, 2].tolist()
three = [[word >> 27 - 3 * n & 7 for n in range(10)] for word in words]
weight = torch.zeros(2, 128)
weight[0, 3] = weight[1, 6] = 1.0
levels = quantize(weight, 8, 0)[0]
touched = [group for group in range(4) if levels[:, group].any()]
axes = inspect.signature(Quantizer.quantize).parameters["axis"].default, BaseQuantizeConfig(nbits=4)["weight_quant_params"]["axis"]
print(version("hqq"), "rows 0..7 in 4 bits:", four, "| rows 0, 0, 0, 1, .. 6 in 3 bits:", three, "| numbers 3 and 134 of 256, axis 0: groups", touched, "| axes taken:", axes)
wanted = [[n // 3 for n in range(20)][first::2] for first in range(2)]
raise SystemExit(four != ["0x4", "0x15", "0x26", "0x37"] or three != wanted or touched != [2, 3] or axes != (0, 1))
PYTHON
