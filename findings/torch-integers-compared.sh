#!/bin/sh
# torch 2.13.0, on a CPU: integers of 8 and 32 bits compared with a number beyond their range
# Guess: compared as numbers, as numpy does, or refused, as torch refuses masked_fill(x, 300), clamp and where ("cannot be converted without overflow")
# Seen: the number is cut to the tensor's type first: of uint8, x < 256 is x < 0 and false for all, x > -1 is x > 255, 44 == 300 is true; of int8, -56 == 200; of int32, 5 < 2**31 is false. A number in a 0-dimensional int64 tensor is cut too, one in a tensor of one dimension is not; a float is compared right. torch.isin(x, 300) finds 44 too
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch

x = torch.tensor([3, 44, 255], dtype=torch.uint8)
seen = {
    "uint8 < 256": x < 256,
    "uint8 > -1": x > -1,
    "uint8 == 300": x == 300,
    "uint8 == 0-dimensional 300": x == torch.tensor(300),
    "uint8 == [300]": x == torch.tensor([300]),
    "isin 300": torch.isin(x, 300),
    "int8 == 200": torch.tensor([-56], dtype=torch.int8) == 200,
    "int32 < 2**31": torch.tensor([5], dtype=torch.int32) < 2**31,
    "uint8 < 256.5": x < 256.5,
}
seen = {name: found.tolist() for name, found in seen.items()}
try:
    x.clamp(max=300)
except RuntimeError as error:
    refused = "overflow" in str(error)
print(torch.__version__, "of [3, 44, 255] in uint8:", seen, "| clamp(max=300) refused:", refused)
none, all_of = [False] * 3, [True] * 3
wanted = [none, none, [False, True, False], [False, True, False], none, [False, True, False], [True], [False], all_of]
raise SystemExit(list(seen.values()) != wanted or not refused)
PYTHON
