#!/bin/sh
# apache-tvm 0.27.0.post1 (relax, compiled for llvm on a CPU): sums of float16 and int8
# Guess: float16 is added in float32 and int8 in int32, as in torch, jax and onnxruntime, whatever the result's type is
# Seen: both are added in their own type, one after the other: 5000 ones in float16 sum to 2048, as a matmul too, and their mean is 0.41; the mean of 100 times 1000 is inf; a softmax of 70,000 equal logits has the sum 34. In int8 three times 100 are 44 and their mean is 14. matmul takes out_dtype="float32", sum no type
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q apache-tvm==0.27.0.post1 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import numpy as np
import tvm
from tvm import relax
from tvm.relax import op


def run(build, *arrays):
    """What `build` makes of variables, compiled for llvm and run."""
    builder = relax.BlockBuilder()
    names = [relax.Var(f"x{n}", relax.TensorType(array.shape, str(array.dtype))) for n, array in enumerate(arrays)]
    with builder.function("main", names):
        with builder.dataflow():
            made = builder.emit_output(builder.emit(build(*names)))
        builder.emit_func_output(made)
    machine = relax.VirtualMachine(tvm.compile(builder.get(), target="llvm"), tvm.cpu())
    made = machine["main"](*[tvm.runtime.tensor(array) for array in arrays])
    return made.numpy().tolist() if hasattr(made, "numpy") else [each.numpy().tolist() for each in made]


ones, thousands, hundreds = np.ones(5000, np.float16), np.full(100, 1000, np.float16), np.full(3, 100, np.int8)
seen = {
    "sum": run(lambda x: op.sum(x), ones), "mean": round(run(lambda x: op.mean(x), ones), 2), "mean of thousands": run(lambda x: op.mean(x), thousands),
    "matmul": run(lambda x, y: op.matmul(x, y), ones[None], ones[:, None])[0][0],
    "matmul, float32": run(lambda x, y: op.matmul(x, y, out_dtype="float32"), ones[None], ones[:, None])[0][0],
    "softmax": round(sum(run(lambda x: op.nn.softmax(x), np.zeros((1, 70000), np.float16))[0])),
    "sum of int8": run(lambda x: op.sum(x), hundreds), "mean of int8": run(lambda x: op.mean(x), hundreds),
}
print("apache-tvm", tvm.__version__, seen)
wanted = {
    "sum": 2048.0, "mean": 0.41, "mean of thousands": float("inf"), "matmul": 2048.0, "matmul, float32": 5000.0, "softmax": 34,
    "sum of int8": 44, "mean of int8": 14,
}
raise SystemExit(seen != wanted)
PYTHON
