#!/bin/sh
# onnxruntime 1.31.1, onnx 1.23.2, on a CPU: TopK of numbers with a NaN
# Guess: the NaN counts as the largest, as in torch and jax, or as the smallest; the others come in their order
# Seen: neither: of [1, NaN, 3, 2] the two largest are 1 and NaN, the three largest NaN, 3, 2; of [3, 1, NaN, 2] the three are 3, 1, NaN: what is larger than a given number depends on where the NaN stands, and a larger one is missing
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


def largest(numbers, count):
    node = helper.make_node("TopK", ["x", "k"], ["y", "places"], axis=0)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [numpy_helper.from_array(np.array([count], np.int64), "k")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return str(session.run(None, {"x": np.array(numbers, np.float32)})[0].tolist())


nan = float("nan")
seen = {str(numbers): [largest(numbers, count) for count in (1, 2, 3)] for numbers in ([1, nan, 3, 2], [3, 1, nan, 2], [1, 3, 2])}
print("onnxruntime", onnxruntime.__version__, "the one, two and three largest:", seen)
wanted = {
    "[1, nan, 3, 2]": ["[3.0]", "[1.0, nan]", "[nan, 3.0, 2.0]"], "[3, 1, nan, 2]": ["[3.0]", "[3.0, 2.0]", "[3.0, 1.0, nan]"],
    "[1, 3, 2]": ["[3.0]", "[3.0, 2.0]", "[3.0, 2.0, 1.0]"],
}
raise SystemExit(seen != wanted)
PYTHON
