#!/bin/sh
# Triton 3.7.1: for k in range(n, 0, step) with step = -1 as an argument of the launch
# Guess: Python's range, which its docstring says tl.range follows: n rounds; interpreted and compiled alike
# Seen: compiled, the loop is left before its first round, since it runs while k < 0; interpreted, it makes n rounds, and with step a constexpr both do. A loop becomes MLIR's scf.for, whose step has to be positive (MLIR, "scf" dialect); triton/compiler/code_generator.py, `visit_For`, turns only constants round
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1 torch==2.13.0 numpy==2.3.5
cd "$work"
cat > down.py <<'PYTHON'
import os
import re
import sys

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import triton
import triton.language as tl


@triton.jit
def down(n, step, out):
    rounds = 0
    for _ in range(n, 0, step):
        rounds += 1
    tl.store(out, rounds)


if os.environ.get("TRITON_INTERPRET") == "1":
    import torch

    out = torch.zeros(1, dtype=torch.int32)
    down[(1,)](10, -1, out)
    print(triton.__version__, "interpreted, rounds:", out.item())
    sys.exit(out.item() != 10)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def loop(kind, constants):
    source = ASTSource(fn=down, signature={"n": "i32", "step": kind, "out": "*i32"}, constexprs=constants)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    return re.sub(r" iter_args.*", "", re.search(r"scf\.for .*", text)[0])


seen = [loop("i32", {}), loop("constexpr", {"step": -1})]
print(triton.__version__, "compiled, step an argument and a constant:", seen)
sys.exit(seen != ["scf.for %_ = %n to %c0_i32 step %step", "scf.for %arg2 = %c0_i32 to %n step %c1_i32"])
PYTHON
TRITON_INTERPRET=1 "$work/venv/bin/python" down.py
"$work/venv/bin/python" down.py
