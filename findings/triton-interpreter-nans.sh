#!/bin/sh
# Triton 3.7.1: NaN in tl.minimum, tl.maximum, tl.clamp and tl.max, under TRITON_INTERPRET=1 and compiled for sm_90
# Guess: under the default, PropagateNan.NONE, both give the number that stands beside a NaN, and a clamped NaN becomes a bound or stays NaN in both
# Seen: interpreted, minimum, maximum and clamp keep the NaN, and tl.max drops one that tl.argmax points at; compiled, they are min.f32 and max.f32, which give the number, and clamp(x, -1, 1) is one min.xorsign.abs, which makes 1 or -1 of a NaN by its sign
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1 torch==2.13.0 numpy==2.3.5
cd "$work"
cat > nans.py <<'PYTHON'
import os
import re
import sys

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import triton
import triton.language as tl


@triton.jit
def pairs(x, y, out, size: tl.constexpr):
    at = tl.arange(0, size)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tl.minimum(a, b))
    tl.store(out + size + at, tl.maximum(a, b))
    tl.store(out + 2 * size + at, tl.clamp(a, -1.0, 1.0))


@triton.jit
def largest(x, out, size: tl.constexpr):
    a = tl.load(x + tl.arange(0, size))
    tl.store(out, tl.max(a, axis=0))
    tl.store(out + 1, tl.argmax(a, axis=0))


if os.environ.get("TRITON_INTERPRET") == "1":
    import torch

    x, y = torch.tensor([torch.nan, 1.0, 5.0, 2.0]), torch.tensor([3.0, torch.nan, 4.0, 4.0])
    out, best = torch.zeros(3, 4), torch.zeros(2)
    pairs[(1,)](x, y, out, 4)
    largest[(1,)](x, best, 4)
    seen = dict(zip(("minimum", "maximum", "clamp", "max, argmax"), [*map(str, out.tolist()), best.tolist()], strict=True))
    print(triton.__version__, "interpreted", x.tolist(), y.tolist(), seen)
    wanted = ["[nan, nan, 4.0, 2.0]", "[nan, nan, 5.0, 4.0]", "[nan, 1.0, 1.0, 1.0]", [5.0, 0.0]]
    sys.exit(list(seen.values()) != wanted)
else:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "size": "constexpr"}
    source = ASTSource(fn=pairs, signature=types, constexprs={"size": 128})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    seen = sorted(set(re.findall(r"\b(?:min|max)\.[\w.]*f32\b", text)))
    print(triton.__version__, "compiled to", seen)
    sys.exit(seen != ["max.f32", "min.f32", "min.xorsign.abs.f32"])
PYTHON
TRITON_INTERPRET=1 "$work/venv/bin/python" nans.py
"$work/venv/bin/python" nans.py
