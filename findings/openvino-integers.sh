#!/bin/sh
# openvino 2026.4.1, on a CPU: integers of 8, 32 and 64 bits
# Guess: as numpy: each type is computed in itself, and wraps
# Seen: int64 and uint64 are computed in 32 bits, whatever the model and its outputs say: 2^40 + 1 is 1, and 2^40 is not equal to a constant of 2^40; int32 are compared as float32, so 16777216 equals 16777217. In uint8 and int8, add stops at the end (200 + 200 is 255, 100 + 100 is 127), and so does a sum, where cum_sum wraps: three times 100 are 127 by one and 44 by the other
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q openvino==2026.4.1 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import numpy as np
import openvino
import openvino.opset13 as op

core = openvino.Core()


def run(build, *numbers, kind):
    x = op.parameter([len(numbers)], openvino.Type(np.dtype(kind)))
    compiled = core.compile_model(openvino.Model([build(x)], [x]), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.asarray(compiled([np.array(numbers, kind)])[0]).tolist()


def constant(number, kind=np.int32):
    return op.constant(np.array(number, kind))


seen = {
    "int64 + 1": run(lambda x: op.add(x, constant(1, np.int64)), 2**40, kind=np.int64),
    "int64 ==": run(lambda x: op.equal(x, constant(2**40, np.int64)), 2**40, 5, kind=np.int64),
    "int32 ==": run(lambda x: op.equal(x, constant(16777217)), 16777216, 16777217, 16777219, kind=np.int32),
    "uint8 +": run(lambda x: op.add(x, x), 200, kind=np.uint8), "int8 +": run(lambda x: op.add(x, x), 100, kind=np.int8),
    "uint8 -": run(lambda x: op.subtract(x, constant(2, np.uint8)), 1, kind=np.uint8),
    "int8 sum": run(lambda x: op.reduce_sum(x, constant([0]), False), 100, 100, 100, kind=np.int8),
    "int8 cum_sum": run(lambda x: op.cum_sum(x, constant(0)), 100, 100, 100, kind=np.int8),
}
print("openvino", openvino.__version__, seen)
wanted = {
    "int64 + 1": [1], "int64 ==": [False, False], "int32 ==": [True, True, False], "uint8 +": [255], "int8 +": [127], "uint8 -": [0],
    "int8 sum": 127, "int8 cum_sum": [100, -56, 44],
}
raise SystemExit(seen != wanted)
PYTHON
