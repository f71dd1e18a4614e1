#!/bin/sh
# mlx 0.32.4, on a CPU: mx.quantize in 4 and 3 bits
# Guess: scale is (max - min) / 15 and bias is min, so level 0 is the smallest number; ten numbers of 3 bits are in a uint32
# Seen: the end of larger magnitude is the bias, so where that is the maximum the scale is negative and level 0 the largest number; the scale is then changed so that 0 is a level, which may move the other end (.45 to .4); numbers of 3 bits cross the borders of words
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'mlx[cpu]==0.32.4'
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import mlx.core as mx
from importlib.metadata import version

mx.set_default_device(mx.cpu)


def group(*numbers):
    levels, scale, bias = mx.quantize(mx.array([[*numbers, *[0.0] * (64 - len(numbers))]]), group_size=64, bits=4)
    back = mx.dequantize(levels, scale, bias, group_size=64, bits=4)[0, : len(numbers)].tolist()
    return [levels[0, 0].item() & 255, round(scale.item(), 4), bias.item(), [round(x, 4) for x in back]]


seen = [group(-1.0, 2.0), group(-2.0, 1.0), group(-1.0, 0.45)]
words = mx.quantize(mx.array([[n % 8 * 1.0 for n in range(64)]]), group_size=64, bits=3)[0][0].tolist()
whole = sum(word << 32 * n for n, word in enumerate(words))
across = [whole >> 3 * n & 7 for n in range(64)] == [7 - n % 8 for n in range(64)]
print(version("mlx"), "-1 2, -2 1, -1 .45: first two levels, scale, bias, numbers back:", seen, "| 64 numbers of 3 bits:", len(words), "words, one row of bits:", across)
wanted = [[0x0F, -0.2, 2.0, [-1.0, 2.0]], [0xF0, 0.2, -2.0, [-2.0, 1.0]], [0xE0, 0.1, -1.0, [-1.0, 0.4]]]
raise SystemExit(seen != wanted or len(words) != 6 or not across)
PYTHON
