#!/bin/sh
# Triton 3.7.1, compiled for sm_90 and sm_89: tl.dot of e4m3 matrices, with a result of float32
# Guess: sums are float32, as the type of the result says
# Seen: on sm_90 max_num_imprecise_acc is 2^30 unless it is given: all products of a row, over all rounds of the loop, stay in the tensor core's own sum, which keeps some 14 bits (DeepSeek-V3 Technical Report, 3.3.2); 32 makes it add every 32 products up in float32, and 0 makes it multiply in float16. On sm_89 there is none of it. triton/backends/nvidia/compiler.py (max_num_imprecise_acc_default), triton/language/semantic.py (dot)
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1
cd "$work"
cat > dot.py <<'PYTHON'
import os
import re

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def product(x, y, out, size: tl.constexpr, apart: tl.constexpr):
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    total = tl.zeros((64, 64), tl.float32)
    for start in range(0, size, 64):
        a, b = tl.load(x + row * size + start + column), tl.load(y + (start + row) + column * size)
        total = tl.dot(a, b, total, max_num_imprecise_acc=apart)
    tl.store(out + row * 64 + column, total)


def made(arch, kind, apart):
    signature = {"x": f"*{kind}", "y": f"*{kind}", "out": "*fp32", "size": "constexpr", "apart": "constexpr"}
    source = ASTSource(fn=product, signature=signature, constexprs={"size": 512, "apart": apart})
    asm = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm
    most = [int(n) for n in re.findall(r"maxNumImpreciseAcc = (\d+)", asm["ttgir"])]
    adds = len(re.findall(r"\badd\.(?:rn\.)?f32", asm["ptx"]))
    return most, adds, sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync[\w.:]*", asm["ptx"])))


cases = ((90, "fp8e4nv", None), (90, "fp8e4nv", 32), (90, "fp8e4nv", 0), (90, "fp16", None), (89, "fp8e4nv", None))
seen = [made(*case) for case in cases]
print(triton.__version__)
for case, found in zip(cases, seen):
    print("sm_%d %s, max_num_imprecise_acc %s:" % case, "in the compiled text %s, %d additions in float32, %s" % found)
wanted = [([2**30], False, "wgmma", "e4m3"), ([32], True, "wgmma", "e4m3"), ([], False, "mma", "f16"), ([], False, "wgmma", "f16"), ([], False, "mma", "e4m3")]
raise SystemExit([(most, adds > 0, name.split(".")[0], "e4m3" if "e4m3" in name else "f16") for most, adds, (name,) in seen] != wanted)
PYTHON
"$work/venv/bin/python" dot.py
