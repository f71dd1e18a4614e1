#!/bin/sh
# Triton 3.7.1, compiled for sm_90: x / y, tl.sqrt, tl.rsqrt and tl.exp of float32
# Guess: / and sqrt are IEEE's, rounded to the nearest, as PyTorch's on the same GPU (nvcc's default, -prec-div=true), so a quantiser written in both gives the same levels
# Seen: / is div.full.f32, which may be off by 2 ulp, sqrt is sqrt.approx.ftz.f32, which takes a subnormal number for 0; the interpreter uses numpy's, which are exact. tl.div_rn and tl.sqrt_rn are IEEE's: docstrings "precise division (rounding to nearest wrt the IEEE standard)"; ulps: PTX ISA, div and sqrt
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1
cd "$work"
cat > divide.py <<'PYTHON'
import os
import re

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def by_default(x, y, out):
    at = tl.arange(0, 128)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a / b)
    tl.store(out + 128 + at, tl.sqrt(a))
    tl.store(out + 256 + at, tl.rsqrt(a))
    tl.store(out + 384 + at, tl.exp(a))


@triton.jit
def rounded(x, y, out):
    at = tl.arange(0, 128)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tl.div_rn(a, b))
    tl.store(out + 128 + at, tl.sqrt_rn(a))


def made(kernel):
    source = ASTSource(fn=kernel, signature={"x": "*fp32", "y": "*fp32", "out": "*fp32"}, constexprs={})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return sorted(set(re.findall(r"^\s+((?:div|sqrt|rsqrt|ex2)\.[\w.]+)", text, re.M)))


seen = {kernel.fn.__name__: made(kernel) for kernel in (by_default, rounded)}
print(triton.__version__, seen)
fast = ["div.full.f32", "ex2.approx.f32", "rsqrt.approx.ftz.f32", "sqrt.approx.ftz.f32"]
raise SystemExit(seen != {"by_default": fast, "rounded": ["div.rn.f32", "sqrt.rn.f32"]})
PYTHON
"$work/venv/bin/python" divide.py
