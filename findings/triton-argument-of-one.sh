#!/bin/sh
# Triton 3.7.1, compiled for sm_90: -n // 2 and -n % 2, where n is an argument
# Guess: one rule for every n: that of C for numbers at run time (-1 // 2 is 0, -1 % 2 is -1)
# Seen: an argument that is 1 becomes a constant of the kernel, and constants divide as in Python: -1 // 2 is -1 and -1 % 2 is 1, while n = 3 gives -1 and -1, C's
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1
cd "$work"
cat > one.py <<'PYTHON'
import os
import re

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature


@triton.jit
def halves(out, n):
    tl.store(out, -n // 2)
    tl.store(out + 1, -n % 2)


def text(kind, constants):
    source = ASTSource(fn=halves, signature={"out": "*i32", "n": kind}, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


class Pointer:
    dtype = "i32"

    def data_ptr(self):
        return 0


backend = triton.compiler.compiler.make_backend(GPUTarget("cuda", 90, 32))
bind = create_function_from_signature(halves.signature, halves.params, backend)
kinds = {n: bind(Pointer(), n)[1][1][0] for n in (1, 2, 3)}
folded = [int(x) for x in re.findall(r"mov\.b32 +\t?%r\d+, (-?\d+);", text("constexpr", {"n": 1}))]
shifts = re.findall(r"\bshr\.[us]32\b", text("i32", {}))
print(triton.__version__, "kinds of n that a launch gives:", kinds, "| n = 1 stores", folded, "| any other n: C's division, by", shifts)
raise SystemExit(kinds != {1: "constexpr", 2: "i32", 3: "i32"} or folded != [-1, 1] or shifts[:2] != ["shr.u32", "shr.s32"])
PYTHON
"$work/venv/bin/python" one.py
