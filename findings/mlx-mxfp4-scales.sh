#!/bin/sh
# mlx 0.32.4, on a CPU: mx.quantize(mode="mxfp4")
# Guess: OCP's rule, to whose specification its docstring points: the exponent of a block's scale is floor(log2(largest)) - 2 (OCP Microscaling Formats 1.0, 6.3)
# Seen: the exponent is ceil(log2(largest / 6)), one more than OCP's where the largest number is beyond 6 * 2^n, so that nothing is cut off; and ties go to the smaller number: 3.5 to 3 and 5 to 4, 0.75 to 0.5, where OCP's ties to the even one (5.3) make 4, 4 and 1 of them
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'mlx[cpu]==0.32.4'
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
from math import ceil, floor, log2

import mlx.core as mx

mx.set_default_device(mx.cpu)


def block(largest, *others):
    numbers = mx.array([[largest, *others, *[0.0] * (31 - len(others))]])
    levels, scales = mx.quantize(numbers, mode="mxfp4", group_size=32)
    back = mx.dequantize(levels, scales, mode="mxfp4", group_size=32)
    return scales[0, 0].item() - 127, back[0, : 1 + len(others)].astype(mx.float32).tolist()


tops = [3.0, 4.0, 5.9, 6.1, 7.5, 8.0, 11.0, 12.5, 0.0061]
exponents = [block(top)[0] for top in tops]
specified = [floor(log2(top)) - 2 for top in tops]
ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
rounded = block(6.0, *ties)[1][1:]
print("mlx", version("mlx"), "largest", tops, "exponent", exponents, "OCP's", specified, "| ties", ties, "to", rounded)
raise SystemExit(exponents != [ceil(log2(top / 6)) for top in tops] or exponents == specified or rounded != [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
PYTHON
