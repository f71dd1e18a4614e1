#!/bin/sh
# Triton 3.7.1: tl.sort of float32 with a NaN, under TRITON_INTERPRET=1 and compiled for sm_90
# Guess: the NaN is last, as torch.sort has it, or stays somewhere among the others
# Seen: it is gone, and a number that it was compared with is there twice: [3, 1, NaN, 2] becomes [1, 2, 2, 3]; each side of a pair decides by itself, and the compiled kernel by setp.gt and its opposite, setp.leu, too
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1 torch==2.13.0 numpy==2.3.5
cd "$work"
cat > sorted.py <<'PYTHON'
import os
import re
import sys

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import torch
import triton
import triton.language as tl


@triton.jit
def ordered(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.sort(tl.load(x + at)))


if os.environ.get("TRITON_INTERPRET") == "1":
    for numbers, wanted in (([3, 1, torch.nan, 2], [1, 2, 2, 3]), ([3, 1, torch.nan, 2, 0, 7, 5, 4], [0, 1, 2, 2, 3, 4, 5, 7])):
        x = torch.tensor(numbers)
        out = torch.zeros_like(x)
        ordered[(1,)](x, out, len(numbers))
        print(triton.__version__, "interpreted", numbers, "->", out.tolist(), "torch:", x.sort().values.tolist())
        if out.tolist() != wanted:
            sys.exit(1)
else:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=ordered, signature={"x": "*fp32", "out": "*fp32", "size": "constexpr"}, constexprs={"size": 8})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    seen = sorted(set(re.findall(r"setp\.\w+\.f32", text)))
    print(triton.__version__, "compiled, numbers are compared by", seen)
    sys.exit(seen != ["setp.gt.f32", "setp.leu.f32"])
PYTHON
TRITON_INTERPRET=1 "$work/venv/bin/python" sorted.py
"$work/venv/bin/python" sorted.py
