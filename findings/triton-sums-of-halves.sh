#!/bin/sh
# Triton 3.7.1, compiled for sm_90: tl.sum and tl.cumsum of float16 and bfloat16
# Guess: what tl.sum's own docstring says: "float dtypes are upcasted to at least tl.float32", as torch.sum adds them up
# Seen: tl.sum adds with add.f16 and add.bf16, so each step is rounded and a float16 sum ends at 65504; tl.cumsum adds bfloat16 in float32, float16 not; only dtype=tl.float32 does what is said
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1
cd "$work"
cat > sums.py <<'PYTHON'
import os
import re

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def total(x, out, size: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, size)), axis=0))


@triton.jit
def wide(x, out, size: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, size)), axis=0, dtype=tl.float32))


@triton.jit
def running(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.cumsum(tl.load(x + at), axis=0))


def additions(kernel, kind):
    types = {"x": kind, "out": "*fp32", "size": "constexpr"}
    source = ASTSource(fn=kernel, signature=types, constexprs={"size": 128})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return sorted(set(re.findall(r"\badd\.(?:rn\.)?(?:b?f16|f32)\b", text)))


said = "upcasted to at least" in tl.sum.__doc__
seen = {k.__name__: [additions(k, kind) for kind in ("*fp16", "*bf16")] for k in (total, wide, running)}
print(triton.__version__, "of float16, bfloat16:", seen, "docstring promises float32:", said)
wanted = {"total": [["add.f16"], ["add.bf16"]], "wide": [["add.f32"]] * 2, "running": [["add.f16"], ["add.f32"]]}
raise SystemExit(seen != wanted or not said)
PYTHON
"$work/venv/bin/python" sums.py
