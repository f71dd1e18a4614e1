#!/bin/sh
# nvidia-cutlass-dsl 4.8.1 (CuTe in Python), a jit function on the host: //, % and comparisons of its numbers
# Guess: the function is written in Python, so -7 // 2 is -4 and -7 % 2 is 1; or both are C's, -3 and -1; 3 > -7
# Seen: one of each: -7 // 2 is -4 and -7 % 2 is -1, so a // b * b + a % b is not a (-9); -7.5 % 2 is -1.5. A Uint32 of 3 is not larger than an Int32 of -7, and less 5 it is 4294967294
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q nvidia-cutlass-dsl==4.8.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import subprocess
import sys

program = """
import cutlass
import cutlass.cute as cute


@cute.jit
def show(a: cutlass.Int32, b: cutlass.Int32, x: cutlass.Float32, y: cutlass.Float32, u: cutlass.Uint32):
    cute.printf("{} {} {} {} {} {}", a // b, a % b, x // y, x % y, u > a, u - 5)


show(cutlass.Int32(-7), cutlass.Int32(2), cutlass.Float32(-7.5), cutlass.Float32(2.0), cutlass.Uint32(3))
"""
with open("show.py", "w") as file:
    file.write(program)
found = subprocess.run([sys.executable, "show.py"], capture_output=True, text=True, check=True).stdout.split()
seen = [float(number) for number in found]
print("nvidia-cutlass-dsl 4.8.1: -7 // 2, -7 % 2, -7.5 // 2, -7.5 % 2, 3 > -7, 3 - 5:", seen, "| Python:", [-7 // 2, -7 % 2, -7.5 // 2, -7.5 % 2, 3 > -7, 3 - 5])
raise SystemExit(seen != [-4, -1, -4, -1.5, 0, 4294967294])
PYTHON
