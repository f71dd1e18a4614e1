#!/bin/sh
# Triton 3.7.1, compiled for sm_90: float16 with bfloat16, int8 with uint8, int32 with uint32
# Guess: PyTorch's rule, which holds what both hold: float32, int16 and int64; or C's, int for the small ones
# Seen: float16 with bfloat16 is float16, so a bfloat16 of 1e5 is inf there and 1e-9 is 0; int8 with uint8 is uint8, int32 with uint32 is uint32, so -1 is the largest number. Triton's documentation, "Triton Semantics", rules 3 and 4: prefer float16, prefer unsigned
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1
cd "$work"
cat > mixed.py <<'PYTHON'
import os
import re

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def smaller(x, y, out):
    at = tl.arange(0, 32)
    tl.store(out + at, tl.load(x + at) < tl.load(y + at))


@triton.jit
def product(x, y, out):
    at = tl.arange(0, 32)
    tl.store(out + at, tl.load(x + at) * tl.load(y + at))


def text(kernel, x, y, out):
    source = ASTSource(fn=kernel, signature={"x": f"*{x}", "y": f"*{y}", "out": f"*{out}"}, constexprs={})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]


seen = {}
for pair in (("fp16", "bf16"), ("bf16", "fp16"), ("bf16", "bf16")):
    found = text(product, *pair, "fp32")
    seen[pair] = re.search(r"arith\.mulf .*x(\w+)>", found)[1], len(re.findall(r"arith\.truncf .*xf16>", found))
for pair in (("i8", "u8"), ("i32", "u32"), ("i32", "i32"), ("i16", "u8")):
    seen[pair] = re.search(r"arith\.cmpi (\w+), .*x(\w+)>", text(smaller, *pair, "i1")).groups()
print(triton.__version__, "multiplied in (type, casts to it); compared as:", seen)
wanted = {
    ("fp16", "bf16"): ("f16", 1), ("bf16", "fp16"): ("f16", 1), ("bf16", "bf16"): ("bf16", 0),
    ("i8", "u8"): ("ult", "i8"), ("i32", "u32"): ("ult", "i32"), ("i32", "i32"): ("slt", "i32"), ("i16", "u8"): ("slt", "i16"),
}
raise SystemExit(seen != wanted)
PYTHON
"$work/venv/bin/python" mixed.py
