#!/bin/sh
# ml_dtypes 0.6.0, jax 0.10.2, openvino 2026.4.1, onnxruntime 1.31.1, mlx 0.32.4, on a CPU: float32 to float8_e4m3fn (mlx: to_fp8), of 464, 465, inf and NaN, and float4 of NaN
# Guess: one rule in all: what is too large becomes 448, and NaN stays NaN
# Seen: beyond 464 it is NaN in ml_dtypes, jax and openvino, and 448 in onnxruntime and mlx; inf is the same, and mlx makes 448 of NaN too. Of a NaN, float4_e2m1 is -0 in ml_dtypes and 6 in openvino. ONNX says which (operator Cast, table of `saturate`, whose default is 1); OCP's 8-bit Floating Point Specification 1.0 has both ways
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q ml_dtypes==0.6.0 jax==0.10.2 openvino==2026.4.1 onnxruntime==1.31.1 onnx==1.23.2 'mlx[cpu]==0.32.4' numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import jax.numpy as jnp
import ml_dtypes
import mlx.core as mx
import numpy as np
import onnxruntime
import openvino
from onnx import TensorProto, helper
from openvino import opset13

mx.set_default_device(mx.cpu)
numbers = np.array([464, 465, np.inf, -np.inf, np.nan], np.float32)


def by_openvino(kind):
    x = opset13.parameter([5], np.float32)
    model = openvino.Model([opset13.convert(opset13.convert(x, kind), openvino.Type.f32)], [x])
    return openvino.Core().compile_model(model, "CPU")([numbers])[0]


def by_onnxruntime():
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E4M3FN), helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [5]) for name in "xz"]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": numbers})[0]


rows = {
    "ml_dtypes": numbers.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "jax": np.asarray(jnp.asarray(numbers).astype(jnp.float8_e4m3fn).astype(jnp.float32)),
    "openvino": by_openvino(openvino.Type.f8e4m3),
    "onnxruntime": by_onnxruntime(),
    "mlx": np.array(mx.from_fp8(mx.to_fp8(mx.array(numbers)), mx.float32)),
}
for name, row in rows.items():
    print(name, version(name), dict(zip(numbers.tolist(), row.tolist())))
four = {"ml_dtypes": str(numbers.astype(ml_dtypes.float4_e2m1fn)[-1]), "openvino": str(by_openvino(openvino.Type.f4e2m1)[-1])}
print("float4 of NaN:", four)
nan, cut = [448.0] + [np.nan] * 4, [448.0, 448.0, 448.0, -448.0]
wanted = {"ml_dtypes": nan, "jax": nan, "openvino": nan, "onnxruntime": [*cut, np.nan], "mlx": [*cut, 448.0]}
same = all(np.array_equal(rows[name], wanted[name], equal_nan=True) for name in wanted)
raise SystemExit(not same or four != {"ml_dtypes": "-0", "openvino": "6.0"})
PYTHON
