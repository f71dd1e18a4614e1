#!/bin/sh
# ggml of ggml-python 0.0.45, which pip builds (needs g++), on a CPU: mul_mat of float16 weights with float32 activations, and argmax of equal numbers
# Guess: the weights are widened: 0.001 times 1e5 is 100, as float32 in torch and numpy; argmax takes the first of equals, as there
# Seen: the activations are cut to float16: 1e5 is inf, and so is the product, and 1e-9 is 0; with the weights in float32 both are right. A model with activations beyond 65504 that runs in bfloat16 has inf as a GGUF file of float16. argmax takes the last of equals, argsort the first
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q ggml-python==0.0.45 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import ctypes
from importlib.metadata import version

import ggml
import numpy as np

context = ggml.ggml_init(ggml.ggml_init_params(mem_size=2**26, mem_buffer=None, no_alloc=False))
ggml.ggml_cpu_init()


def tensor(numbers, kind):
    array = np.array([numbers], kind)
    made = ggml.ggml_new_tensor_2d(context, {"float32": ggml.GGML_TYPE_F32, "float16": ggml.GGML_TYPE_F16}[kind], len(numbers), 1)
    ctypes.memmove(ggml.ggml_get_data(made), array.ctypes.data, array.nbytes)
    return made


def run(node, kind="float32"):
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, node)
    ggml.ggml_graph_compute_with_ctx(context, graph, 1)
    size = ggml.ggml_nelements(node) * np.dtype(kind).itemsize
    return np.frombuffer(ctypes.string_at(ggml.ggml_get_data(node), size), kind).tolist()


def product(weight, activation, kind):
    made = run(ggml.ggml_mul_mat(context, tensor([weight] + [0] * 31, kind), tensor([activation] + [0] * 31, "float32")))
    return float(f"{made[0]:.4g}")


equal = [1, 3, 3, 2]
seen = {
    "large": (product(0.001, 1e5, "float16"), product(0.001, 1e5, "float32")), "small": (product(1000, 1e-9, "float16"), product(1000, 1e-9, "float32")),
    "argmax": run(ggml.ggml_argmax(context, tensor(equal, "float32")), "int32")[0],
    "argsort": run(ggml.ggml_argsort(context, tensor(equal, "float32"), ggml.GGML_SORT_ORDER_DESC), "int32")[0],
}
print("ggml-python", version("ggml-python"), "float16 and float32 weights:", seen, "| numpy's argmax:", int(np.argmax(equal)))
wanted = {"large": (float("inf"), 100.0), "small": (0.0, 1e-06), "argmax": 2, "argsort": 1}
raise SystemExit(seen != wanted)
PYTHON
