#!/bin/sh
# ml_dtypes 0.6.0, jax 0.10.2, onnx 1.23.2, on a CPU: NaN cast to FP4 and FP6
# Guess: these types have no NaN, so it becomes the largest number, as inf does (OCP leaves it open), and a broken activation can be seen
# Seen: NaN becomes -0 in float4_e2m1fn, float6_e2m3fn and float6_e3m2fn, in all three, so it is gone from a product; inf becomes 6 (7.5, 28). A NaN in the scale, float8_e8m0fnu, is kept
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q ml_dtypes==0.6.0 jax==0.10.2 onnx==1.23.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

numbers = np.array([np.nan, np.inf, -np.inf], np.float32)
nodes = [helper.make_node("Cast", ["x"], ["small"], to=TensorProto.FLOAT4E2M1), helper.make_node("Cast", ["small"], ["y"], to=TensorProto.FLOAT)]
ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [3])] for name in "xy"]
model = helper.make_model(helper.make_graph(nodes, "casts", *ends), opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
seen = {name: numbers.astype(getattr(ml_dtypes, name)).astype(np.float32) for name in ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e8m0fnu")}
seen["jax, e2m1fn"] = np.asarray(jnp.asarray(numbers).astype(jnp.float4_e2m1fn).astype(jnp.float32))
seen["onnx, e2m1"] = ReferenceEvaluator(model).run(None, {"x": numbers})[0]
print("ml_dtypes", ml_dtypes.__version__, "jax", jax.__version__, "onnx", onnx.__version__, "NaN, inf, -inf:", {name: each.tolist() for name, each in seen.items()})
largest = {"float4_e2m1fn": 6, "float6_e2m3fn": 7.5, "float6_e3m2fn": 28, "jax, e2m1fn": 6, "onnx, e2m1": 6}
zero = all(seen[name].tolist() == [0, most, -most] and np.signbit(seen[name][0]) for name, most in largest.items())
raise SystemExit(not zero or not np.isnan(seen["float8_e8m0fnu"][0]))
PYTHON
