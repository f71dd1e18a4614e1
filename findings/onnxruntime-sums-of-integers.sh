#!/bin/sh
# onnxruntime 1.31.1, on a CPU: sums of int32 and int64 (numpy 2.3.5 beside it)
# Guess: whole numbers are added as whole numbers: a sum that fits is exact, one that does not wraps, as in numpy and torch
# Seen: ReduceSum, ReduceMean and ReduceProd go through float64: of int64, 2^53 + 1 and 0 sum to 2^53, so sums of hashes and packed numbers are off; what does not fit stops at the end (2^31 - 1, 2^63 - 1). Add and Sum of two tensors, and CumSum, are exact and wrap
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q onnxruntime==1.31.1 onnx==1.23.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import helper


def run(operator, *inputs, **settings):
    names = [f"i{n}" for n in range(len(inputs))]
    ends = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape) for name, each in zip(names, inputs)]
    node = helper.make_node(operator, names, ["o"], **settings)
    graph = helper.make_graph([node], "g", ends, [helper.make_empty_tensor_value_info("o")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, inputs)))[0].tolist()


odd, large = np.array([2**53 + 1, 0]), np.array([2**30] * 3, np.int32)
seen = {
    "sum": run("ReduceSum", odd, keepdims=0), "mean": run("ReduceMean", odd[:1], keepdims=0), "prod": run("ReduceProd", np.array([2**53 + 1, 1]), keepdims=0),
    "sum beyond": run("ReduceSum", large, keepdims=0), "sum of int64 beyond": run("ReduceSum", np.array([2**62] * 3), keepdims=0),
    "add": run("Add", odd, odd)[0], "cumsum beyond": run("CumSum", large, np.array(0))[-1],
}
numpys = int(odd.sum()), int(large.sum(dtype=np.int32))
print("onnxruntime", onnxruntime.__version__, seen, "| numpy's sums:", numpys)
wanted = {
    "sum": 2**53, "mean": 2**53, "prod": 2**53, "sum beyond": 2**31 - 1, "sum of int64 beyond": 2**63 - 1, "add": 2**54 + 2, "cumsum beyond": -(2**30),
}
raise SystemExit(seen != wanted or numpys != (2**53 + 1, -(2**30)))
PYTHON
