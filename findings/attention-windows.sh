#!/bin/sh
# jax 0.10.2, onnxruntime 1.31.1, on a CPU: attention with local_window_size=4
# Guess: a query sees 4 keys, its own among them, as `sliding_window: 4` of a Mistral's or Gemma's config.json means
# Seen: in jax it is 4 keys to the left beside its own, and 4 to the right unless is_causal: 9 and 5 keys; in onnxruntime's GroupQueryAttention it is 4 with its own; and there seqlens_k is the count of keys less one. jax.nn.dot_product_attention's docstring ("(left, right)", of which one number is both); onnxruntime docs/ContribOperators.md
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jax==0.10.2 onnxruntime==1.31.1 onnx==1.23.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

count, size = 10, 16
ones = np.eye(count, size, dtype=np.float32)[None]  # value k is 1 at k, so an output is what its query sees


def by_jax(**settings):
    values = jnp.asarray(ones)[:, :, None]
    weights = jax.nn.dot_product_attention(values * 0, values * 0, values, **settings)
    return np.count_nonzero(np.asarray(weights)[0, :, 0], axis=1).tolist()


def by_onnxruntime(lengths):
    feeds = {"q": ones * 0, "k": ones * 0, "v": ones, "before": ones[:, None, :0], "lengths": np.array([lengths], np.int32), "total": np.array(count, np.int32)}
    names = ["q", "k", "v", "before", "before", "lengths", "total"]
    node = helper.make_node("GroupQueryAttention", names, ["y", "keys", "values"], domain="com.microsoft", num_heads=1, kv_num_heads=1, local_window_size=4)
    inputs = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for name, x in feeds.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "keys", "values")]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.count_nonzero(session.run(["y"], feeds)[0][0], axis=1).tolist()


seen = {"both ways": by_jax(local_window_size=4), "causal": by_jax(local_window_size=4, is_causal=True), "onnxruntime": by_onnxruntime(count - 1)}
print("jax", jax.__version__, "onnxruntime", onnxruntime.__version__, "keys that each of 10 queries sees:", seen)
wanted = {"both ways": [5, 6, 7, 8, 9, 9, 8, 7, 6, 5], "causal": [1, 2, 3, 4, 5, 5, 5, 5, 5, 5], "onnxruntime": [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]}
raise SystemExit(seen != wanted)
PYTHON
