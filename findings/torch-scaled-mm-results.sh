#!/bin/sh
# torch 2.13.0, on a CPU: torch._scaled_mm of FP8 matrices without out_dtype
# Guess: the result is bfloat16 or float32, since it sums up products
# Seen: it is of the first matrix's type, FP8: 34 becomes 32, and 512 is cut to 448 in e4m3fn, which e5m2 makes inf of beyond 57344
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch

one = torch.tensor(1.0)


def product(x, y, kind=torch.float8_e4m3fn, first=None, **settings):
    a, b = torch.full((16, 32), x).to(kind), torch.full((16, 32), y).to(torch.float8_e4m3fn)
    if first is not None:
        a[0, 0] = first
    result = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, **settings)
    return str(result.dtype).removeprefix("torch."), result[0, 0].item()


seen = [product(1.0, 1.0, first=3.0), product(4.0, 4.0), product(8.0, 400.0, torch.float8_e5m2), product(1.0, 1.0, first=3.0, out_dtype=torch.float32)]
print(torch.__version__, "34, 512, 102400, and 34 with out_dtype:", seen)
raise SystemExit(seen != [("float8_e4m3fn", 32.0), ("float8_e4m3fn", 448.0), ("float8_e5m2", float("inf")), ("float32", 34.0)])
PYTHON
