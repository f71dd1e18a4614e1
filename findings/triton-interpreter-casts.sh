#!/bin/sh
# Triton 3.7.1: casts of float32 under TRITON_INTERPRET=1, and the instructions that the same kernel is compiled to for sm_90
# Guess: the interpreter rounds as the compiled kernel does, to the nearest even, and cuts what is too large
# Seen: interpreted, bfloat16 is cut off (1 + 3/256 -> 1 + 2/256), and e4m3 rounds ties upwards and turns 1e4 into 320, inf into 256 and NaN into 384; compiled, they are cvt.rn and cvt.rn.satfinite
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1 torch==2.13.0 numpy==2.3.5
cd "$work"
cat > casts.py <<'PYTHON'
import os
import re
import sys

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import torch
import triton
import triton.language as tl


@triton.jit
def cast(x, out, size: tl.constexpr, kind: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.load(x + at).to(kind))


if os.environ.get("TRITON_INTERPRET") == "1":
    for kind, stored, numbers, wanted in (
        (tl.bfloat16, torch.bfloat16, [1 + 3 / 256, 1 + 1 / 256], [1 + 2 / 256, 1.0]),
        (tl.float8e4nv, torch.float8_e4m3fn, [17.0, 1e4, torch.inf, torch.nan], [18.0, 320.0, 256.0, 384.0]),
    ):
        x, out = torch.tensor(numbers), torch.zeros(len(numbers), dtype=stored)
        cast[(1,)](x, out, len(numbers), kind)
        print(triton.__version__, "interpreted", numbers, "->", out.float().tolist(), "torch:", x.to(stored).float().tolist())
        if out.float().tolist() != wanted:
            sys.exit(1)
else:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    seen = []
    for kind, name in ((tl.bfloat16, "*bf16"), (tl.float8e4nv, "*fp8e4nv")):
        types = {"x": "*fp32", "out": name, "size": "constexpr", "kind": "constexpr"}
        source = ASTSource(fn=cast, signature=types, constexprs={"size": 128, "kind": kind})
        text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        seen += sorted(set(re.findall(r"cvt\.rn[\w.]*", text)))
    print(triton.__version__, "compiled to", seen)
    sys.exit(seen != ["cvt.rn.bf16.f32", "cvt.rn.satfinite.e4m3x2.f32"])
PYTHON
TRITON_INTERPRET=1 "$work/venv/bin/python" casts.py
"$work/venv/bin/python" casts.py
