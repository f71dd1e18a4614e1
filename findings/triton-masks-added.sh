#!/bin/sh
# Triton 3.7.1: two masks with + and -, compiled for sm_90 and under TRITON_INTERPRET=1
# Guess: + of two masks is the union, as of bools in numpy and torch, or counts to 2, as in C and Python; - raises, as there
# Seen: compiled, they are added in one bit: where both are true the sum is false, so + and - are exclusive or; interpreted, + is numpy's, true. The sum's type is int1 in both. `|` is the union. triton/language/semantic.py, `add`, casts a mask to no wider type, as `tl.sum` does
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1 torch==2.13.0 numpy==2.3.5
cd "$work"
cat > masks.py <<'PYTHON'
import os
import re
import sys

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import triton
import triton.language as tl


@triton.jit
def added(x, y, out):
    at = tl.arange(0, 4)
    tl.store(out + at, ((tl.load(x + at) > 0) + (tl.load(y + at) > 0)).to(tl.int32))


if os.environ.get("TRITON_INTERPRET") == "1":
    import torch

    x, y, out = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1], [0] * 4], dtype=torch.int32)
    added[(1,)](x, y, out)
    union = ((x > 0) + (y > 0)).int().tolist()
    print(triton.__version__, "interpreted, (x > 0) + (y > 0) of", x.tolist(), y.tolist(), "is", out.tolist(), "| torch:", union)
    sys.exit(out.tolist() != [0, 1, 1, 1] or union != [0, 1, 1, 1])
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

source = ASTSource(fn=added, signature={"x": "*i32", "y": "*i32", "out": "*i32"}, constexprs={})
made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
kinds, bits = re.findall(r"arith\.add[if] .* : tensor<4x(\w+)>", made.asm["ttir"]), re.findall(r"\b(?:xor|or|and)\.pred", made.asm["ptx"])
print(triton.__version__, "compiled: added as", kinds, "which is", bits)
sys.exit(kinds != ["i1"] or bits != ["xor.pred"])
PYTHON
TRITON_INTERPRET=1 "$work/venv/bin/python" masks.py
"$work/venv/bin/python" masks.py
