#!/bin/sh
# warp-lang 1.19.0, kernels on its CPU device: //, %, round, sign and clamp
# Guess: kernels are written in Python, so -7 // 2 is -4 and -7 % 2 is 1, as on the line outside of the kernel, or both are C's: -3 and -1
# Seen: one of each: -7 // 2 is -4 and -7 % 2 is -1, so a // b * b + a % b is not a (-9); floats alike. wp.round(2.5) is 3, where Python's and wp.rint's is 2; wp.sign(0.0) is 1; wp.clamp of NaN is the lower bound. Warp's reference of built-ins says so of mod ("truncated division"), floordiv, round, sign and clamp
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q warp-lang==1.19.0 numpy==2.3.5
cd "$work"
cat > kernel.py <<'PYTHON'
import os

os.environ["WARP_CACHE_PATH"] = os.path.join(os.getcwd(), "cache")
import warp as wp

wp.config.quiet = True


@wp.kernel
def divide(a: wp.array(dtype=int), x: wp.array(dtype=float), whole: wp.array(dtype=int), parts: wp.array(dtype=float)):
    whole[0] = a[0] // a[1]
    whole[1] = a[0] % a[1]
    parts[0] = x[0] // x[1]
    parts[1] = x[0] % x[1]
    parts[2] = wp.round(x[2])
    parts[3] = wp.rint(x[2])
    parts[4] = wp.sign(x[3])
    parts[5] = wp.clamp(x[4], -1.0, 1.0)


def array(numbers, kind):
    return wp.array(numbers, dtype=kind, device="cpu")


numbers = [-7.5, 2.0, 2.5, 0.0, float("nan")]
whole, parts = array([0, 0], int), array([0.0] * 6, float)
wp.launch(divide, dim=1, inputs=[array([-7, 2], int), array(numbers, float), whole, parts], device="cpu")
whole, parts = whole.numpy().tolist(), parts.numpy().tolist()
names = ("-7.5 // 2", "-7.5 % 2", "round(2.5)", "rint(2.5)", "sign(0)", "clamp(NaN, -1, 1)")
print("warp", wp.__version__, "-7 // 2, -7 % 2:", whole, "| Python:", [-7 // 2, -7 % 2], "|", dict(zip(names, parts)))
raise SystemExit(whole != [-4, -1] or parts != [-4.0, -1.5, 3.0, 2.0, 1.0, -1.0])
PYTHON
"$work/venv/bin/python" kernel.py
