#!/bin/sh
# apache-tvm 0.27.0.post1 (relax, compiled for llvm on a CPU): operators of numbers with a NaN among them
# Guess: as numpy and torch: max, min, relu, clip and maximum keep a NaN, topk and sort put it at one end; or, as C's fmax, drop it
# Seen: neither. min of [1, NaN, 3, 2] is 2, since a NaN makes it begin again behind it, and argmin 3; topk gives NaN and 1, a sort leaves 1, NaN, 2, 3 and argsort 0, 1, 3, 2; relu makes 0 of a NaN, clip to -1 and 1 makes 1; maximum(x, 2) is 2, maximum(2, x) NaN. sum and mean are NaN
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


numbers, two = np.array([1, np.nan, 3, 2], np.float32), relax.const(2.0, "float32")
seen = {
    "max, min, argmax, argmin": [run(lambda x, name=name: getattr(op, name)(x, axis=0), numbers) for name in ("max", "min", "argmax", "argmin")],
    "topk": run(lambda x: op.topk(x, 2, axis=0, ret_type="both"), numbers), "argsort": run(lambda x: op.argsort(x), numbers),
    "relu": run(lambda x: op.nn.relu(x), numbers), "clip": run(lambda x: op.clip(x, -1, 1), numbers),
    "maximum": [run(lambda x: op.maximum(x, two), numbers)[1], run(lambda x: op.maximum(two, x), numbers)[1]], "sum": run(lambda x: op.sum(x), numbers),
}
print("apache-tvm", tvm.__version__, "of 1, NaN, 3, 2:", seen)
nan = float("nan")
wanted = {
    "max, min, argmax, argmin": [3.0, 2.0, 2, 3], "topk": [[nan, 1.0], [1, 0]], "argsort": [0, 1, 3, 2], "relu": [1.0, 0.0, 3.0, 2.0],
    "clip": [1.0, 1.0, 1.0, 1.0], "maximum": [2.0, nan], "sum": nan,
}
raise SystemExit(repr(seen) != repr(wanted))
PYTHON
