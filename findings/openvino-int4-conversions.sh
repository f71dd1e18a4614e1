#!/bin/sh
# openvino 2026.4.1, CPU: Convert of float32 to i4 and u4, and back
# Guess: i4 holds -8 to 7 and u4 0 to 15, so 17 is cut to the largest or loses its upper bits
# Seen: 17 stays 17 in both, and 100 is 100: they are computed in 8 bits, so a quantiser has to clamp by itself
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q openvino==2026.4.1 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import numpy as np
import openvino
import openvino.opset15 as ops

core = openvino.Core()


def back(kind, *numbers):
    x = ops.parameter([len(numbers)], np.float32)
    model = openvino.Model([ops.convert(ops.convert(x, kind), openvino.Type.f32)], [x])
    return core.compile_model(model, "CPU")(np.array(numbers, np.float32))[0].tolist()


numbers = 6.6, 17.0, 100.0
seen = {kind.get_type_name(): back(kind, *numbers) for kind in (openvino.Type.i4, openvino.Type.u4)}
print(openvino.__version__, numbers, "->", seen)
raise SystemExit(seen != {"i4": [6, 17, 100], "u4": [6, 17, 100]})
PYTHON
