#!/bin/sh
# onnxruntime 1.31.1, on a CPU: Cast of float32 to int4 and to int8, within what each holds
# Guess: one rule for both: cut towards zero, or rounded to the nearest even
# Seen: int8 is cut towards zero, int4 is rounded, halves away from zero: 2.5 is 2 in one and 3 in the other, -0.5 is 0 and -1; QuantizeLinear rounds halves to the even, and gives 2 and 0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q onnxruntime==1.31.1 onnx==1.23.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def run(kind, name, *more, **settings):
    nodes = [helper.make_node(name, ["x", *more], ["y"], **settings), helper.make_node("Cast", ["y"], ["z"], to=TensorProto.INT32)]
    ends = helper.make_tensor_value_info("x", TensorProto.FLOAT, None), helper.make_tensor_value_info("z", TensorProto.INT32, None)
    constants = [numpy_helper.from_array(np.array(1, np.float32), "scale"), helper.make_tensor("zero", kind, [], [0])]
    graph = helper.make_graph(nodes, "g", [ends[0]], [ends[1]], constants if more else [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.array([0.5, 1.5, 2.5, -0.5, -1.7, 6.6], np.float32)})[0].tolist()


seen = {}
for name, kind in (("int8", TensorProto.INT8), ("int4", TensorProto.INT4)):
    seen[name] = [run(kind, "Cast", to=kind), run(kind, "QuantizeLinear", "scale", "zero")]
    print(onnxruntime.__version__, name, "of .5 1.5 2.5 -.5 -1.7 6.6: Cast", seen[name][0], "QuantizeLinear", seen[name][1])
even = [0, 2, 2, 0, -2, 7]
raise SystemExit(seen != {"int8": [[0, 1, 2, 0, -1, 6], even], "int4": [[1, 2, 3, -1, -2, 7], even]})
PYTHON
