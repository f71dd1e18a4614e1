#!/bin/sh
# torch 2.13.0, on a CPU: 2 ** e for a tensor of exponents, as scales of MXFP4 and MXFP8 are decoded
# Guess: 2 ** e is 2 to the e, in int64 or float32; a negative e is refused, as tensor([2]) ** -1 is ("not allowed")
# Seen: it has e's type: of int8 2 ** 7 is -128 and 2 ** 8 is 0, and of all integers 2 ** -1 is 0, and nothing is said; 1 << e is cut the same way. The exponent itself wraps: a uint8 of 126 less 127 is 255, so torch.ldexp(1, e - 127) and 2.0 ** (e - 127) are inf for all scales below 1. e.int() - 127, and 2.0, are right
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch

exponents = torch.tensor([126, 128], dtype=torch.uint8)
seen = {
    "2 ** int8": (2 ** torch.tensor([6, 7, 8], dtype=torch.int8)).tolist(),
    "2 ** -1": [(2 ** torch.tensor([-1], dtype=kind)).item() for kind in (torch.int8, torch.int32, torch.int64)],
    "1 << int8": (1 << torch.tensor([6, 7], dtype=torch.int8)).tolist(),
    "2.0 ** (uint8 - 127)": (2.0 ** (exponents - 127)).tolist(),
    "ldexp": torch.ldexp(torch.ones(2), exponents - 127).tolist(),
    "2.0 ** (int32 - 127)": (2.0 ** (exponents.int() - 127)).tolist(),
}
try:
    torch.tensor([2]) ** -1
except RuntimeError as error:
    refused = str(error)
print(torch.__version__, seen, "| tensor([2]) ** -1:", refused)
inf = float("inf")
raise SystemExit(list(seen.values()) != [[64, -128, 0], [0, 0, 0], [64, -128], [inf, 2.0], [inf, 2.0], [0.5, 2.0]])
PYTHON
