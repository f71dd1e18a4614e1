#!/bin/sh
# Triton 3.7.1, compiled for sm_90: an int32 of -1 beside 3000000000, which is written in the kernel, or is an argument of the launch
# Guess: 3000000000 does not fit int32, so it is int64 and -1 < 3000000000 is true, as in C, torch and numpy
# Seen: a number written in a kernel, or a constexpr, from 2^31 to 2^32 - 1 is uint32, so both are compared in 32 bits without sign, and -1 is 4294967295: false; the same number as an argument of the launch is int64, and it is true. triton/language/semantic.py, `to_tensor_type`; triton/runtime/jit.py for arguments
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1
cd "$work"
cat > literal.py <<'PYTHON'
import os
import re

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature


@triton.jit
def below(x, limit, out):
    at = tl.arange(0, 32)
    tl.store(out + at, tl.load(x + at) < limit)


def compared(kind, constants):
    source = ASTSource(fn=below, signature={"x": "*i32", "limit": kind, "out": "*i1"}, constexprs=constants)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    return " ".join(re.search(r"arith\.cmpi (\w+), .*x(\w+)>", text).groups())


class Pointer:
    def __init__(self, dtype):
        self.dtype = dtype

    def data_ptr(self):
        return 0


backend = triton.compiler.compiler.make_backend(GPUTarget("cuda", 90, 32))
bind = create_function_from_signature(below.signature, below.params, backend)
numbers = [2**31 - 1, 2**31, 3_000_000_000, 2**32]
kinds = [bind(Pointer("i32"), number, Pointer("i1"))[1][1][0] for number in numbers]
seen = [(compared("constexpr", {"limit": number}), compared(kind, {})) for number, kind in zip(numbers, kinds)]
print(triton.__version__, "x (int32) < limit, written in the kernel and as an argument:", dict(zip(numbers, seen)))
signed, wide = "slt i32", "slt i64"
raise SystemExit(seen != [(signed, signed), ("ult i32", wide), ("ult i32", wide), (wide, wide)])
PYTHON
"$work/venv/bin/python" literal.py
