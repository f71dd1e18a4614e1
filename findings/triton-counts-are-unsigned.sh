#!/bin/sh
# Triton 3.7.1, compiled for sm_90: the types of tl.sum and tl.cumsum of a mask, and of tl.randint
# Guess: int32, as the docstrings of tl.sum ("bool dtypes are upcasted to tl.int32") and tl.randint say
# Seen: uint32: a count less one is never below 0, and the count of nothing, less one, is 4294967295 once it is widened to int64; a count of .to(tl.int32) is int32
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1
cd "$work"
cat > counts.py <<'PYTHON'
import os
import re

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def by_mask(x, out, size: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, size)) > 0) - 1)


@triton.jit
def by_number(x, out, size: tl.constexpr):
    tl.store(out, tl.sum((tl.load(x + tl.arange(0, size)) > 0).to(tl.int32)) - 1)


@triton.jit
def running(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.cumsum(tl.load(x + at) > 0) - 1)


@triton.jit
def drawn(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.randint(1, at))


def widened(kernel):
    types = {"x": "*i32", "out": "*i64", "size": "constexpr"}
    source = ASTSource(fn=kernel, signature=types, constexprs={"size": 128})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    return sorted(set(re.findall(r"arith\.ext[us]i.*i32> to .*i64>|arith\.ext[us]i.* : i32 to i64", text)) or [""])[-1].split()[0]


said = "bool dtypes are upcasted to :code:`tl.int32`" in tl.sum.__doc__ and ":code:`int32`" in tl.randint.__doc__
seen = {kernel.__name__: widened(kernel) for kernel in (by_mask, by_number, running, drawn)}
print(triton.__version__, "as int64:", seen, "docstrings say int32:", said)
wanted = {"by_mask": "arith.extui", "by_number": "arith.extsi", "running": "arith.extui", "drawn": "arith.extui"}
raise SystemExit(seen != wanted or not said)
PYTHON
"$work/venv/bin/python" counts.py
