#!/bin/sh
# torch 2.13.0, onnxruntime 1.31.1, jax 0.10.2, mlx 0.32.4, on a CPU: a query that may see no key, and causal attention of few queries to many keys
# Guess: a row that is masked whole is 0 or NaN, in all of them alike; causal means one thing
# Seen: masked by a bool it is 0 in torch and onnxruntime, and the mean of all values, the masked ones, in jax and mlx; by a float -inf it is 0, 0, NaN and NaN. Of 1 query and 5 keys, causal, the first key alone is seen by torch, onnxruntime and jax, all five by mlx
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 onnxruntime==1.31.1 onnx==1.23.2 jax==0.10.2 'mlx[cpu]==0.32.4' numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import onnxruntime
import torch
from importlib.metadata import version
from onnx import TensorProto, helper

mx.set_default_device(mx.cpu)
random = np.random.default_rng(0)
q, k, v = (random.normal(size=(1, 1, n, 8)).astype(np.float32) for n in (1, 5, 5))
shares = np.exp(q[0, 0] @ k[0, 0].T / 8**0.5)
answers = {"0": np.zeros(8), "NaN": np.full(8, np.nan), "mean": v[0, 0].mean(0), "first": v[0, 0, 0], "all": shares[0] / shares.sum() @ v[0, 0]}


def by_torch(mask, causal):
    mask = None if mask is None else torch.tensor(mask)
    return torch.nn.functional.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)), attn_mask=mask, is_causal=causal).numpy()


def by_onnxruntime(mask, causal):
    feeds = {"q": q, "k": k, "v": v} | ({} if mask is None else {"mask": mask})
    kinds = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in feeds.items()}
    node = helper.make_node("Attention", list(feeds), ["y"], is_causal=int(causal))
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def by_jax(mask, causal):
    name = "mask" if mask is not None and mask.dtype == bool else "bias"
    mask = None if mask is None else jnp.asarray(mask)[None, None]
    return np.asarray(jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), is_causal=causal, **{name: mask}))


def by_mlx(mask, causal):
    mask = "causal" if causal else mx.array(mask)
    return np.array(mx.fast.scaled_dot_product_attention(*map(mx.array, (q, k, v)), scale=8**-0.5, mask=mask))


cases = {"bool": (np.zeros((1, 5), bool), False), "-inf": (np.full((1, 5), -np.inf, np.float32), False), "causal": (None, True)}
engines = {"torch": by_torch, "onnxruntime": by_onnxruntime, "jax": by_jax, "mlx": by_mlx}
seen = {}
for engine, attend in engines.items():
    rows = [attend(*case).reshape(8) for case in cases.values()]
    seen[engine] = [next((a for a, x in answers.items() if np.allclose(row, x, atol=1e-5, equal_nan=True)), "?") for row in rows]
    print(engine, version(engine), dict(zip(cases, seen[engine])))
wanted = {"torch": ["0", "0", "first"], "onnxruntime": ["0", "0", "first"], "jax": ["mean", "NaN", "first"], "mlx": ["mean", "NaN", "all"]}
raise SystemExit(seen != wanted)
PYTHON
