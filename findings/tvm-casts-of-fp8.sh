#!/bin/sh
# apache-tvm 0.27.0.post1 (relax, compiled for llvm on a CPU), ml_dtypes 0.6.0 beside it: float32 to float8 and back
# Guess: what no e4m3fn number holds is NaN, as in ml_dtypes, or 448, as in torch; small numbers and 0 are read as the format says
# Seen: the exponent is moved and nothing else is looked at: 480 comes back as 480, 500 as -0.0078, 1e6 as -15, inf as 1 and NaN as 1.5; there are no subnormals: the byte 0 is read as 0.0078125, so a weight that is 0 is not, and 0.001 comes back as 0.0078. In e5m2 inf is 1 and 1e6 -0.00024. Normal numbers round as they should
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q apache-tvm==0.27.0.post1 numpy==2.3.5 ml_dtypes==0.6.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import ml_dtypes
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


numbers = np.array([448, 480, 500, 1e6, np.inf, np.nan, 0.001, 17, 2.5], np.float32)
seen = {}
for kind in ("float8_e4m3fn", "float8_e5m2"):
    there_and_back = run(lambda x: op.astype(op.astype(x, kind), "float32"), numbers)
    bytes_read = run(lambda x: op.astype(x, "float32"), np.arange(4, dtype=np.uint8).view(getattr(ml_dtypes, kind)))
    seen[kind] = [round(n, 6) for n in there_and_back], [round(n, 7) for n in bytes_read]
    print("apache-tvm", tvm.__version__, kind, "of", numbers.tolist(), "is", seen[kind][0], "bytes 0 to 3:", seen[kind][1])
    print("  ml_dtypes:", numbers.astype(getattr(ml_dtypes, kind)).astype(np.float32).tolist())
wrong = seen["float8_e4m3fn"] != ([448.0, 480.0, -0.007812, -15.0, 1.0, 1.5, 0.007812, 16.0, 2.5], [0.0078125, 0.0087891, 0.0097656, 0.0107422])
raise SystemExit(wrong or seen["float8_e5m2"][0] != [448.0, 512.0, 512.0, -0.000244, 1.0, 1.5, 0.000977, 16.0, 2.5])
PYTHON
