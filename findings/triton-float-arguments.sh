#!/bin/sh
# Triton 3.7.1, compiled for sm_90: a float as an argument of the launch, and the same number written in the kernel
# Guess: one as the other: in Python both are doubles; or both take the type of the block that they multiply
# Seen: an argument is float32, a number in the kernel takes the block's type: a float64 block times an argument of 0.1 is times 0.10000000149, and a float16 or bfloat16 block is multiplied in float32 by an argument, but by a 0.1 in the kernel in float16 (0.09998) or bfloat16 (0.10009)
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1
cd "$work"
cat > floats.py <<'PYTHON'
import os
import re

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type


@triton.jit
def written(x, out):
    at = tl.arange(0, 32)
    tl.store(out + at, tl.load(x + at) * 0.1)


@triton.jit
def passed(x, factor, out):
    at = tl.arange(0, 32)
    tl.store(out + at, tl.load(x + at) * factor)


def product(kernel, **signature):
    source = ASTSource(fn=kernel, signature=signature, constexprs={})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    widened = re.search(r"extf %factor : (f32 to f64)", text)
    return re.search(r"arith\.mulf .*x(\w+)>", text)[1], widened and widened[1]


argument = mangle_type(0.1)
seen = {}
for kind in ("fp16", "bf16", "fp64"):
    seen[kind] = product(written, x=f"*{kind}", out="*fp64"), product(passed, x=f"*{kind}", factor=argument, out="*fp64")
print(triton.__version__, "an argument of 0.1 is", argument, "| multiplied in (written, passed):", seen)
wanted = {
    "fp16": (("f16", None), ("f32", None)), "bf16": (("bf16", None), ("f32", None)), "fp64": (("f64", None), ("f64", "f32 to f64")),
}
raise SystemExit(argument != "fp32" or seen != wanted)
PYTHON
"$work/venv/bin/python" floats.py
