#!/bin/sh
# numba 0.68.1 with numpy 2.3.5: a uint64 hash with int64 numbers
# Guess: as numpy, where a Python int takes the hash's type: h % 3, h // 2 and h * 31 stay uint64, modulo 2^64
# Seen: h * 31 + x is float64, so a hash made that way is rounded to 53 bits; h % 3 and h // 2 are int64, so of 2^63 + 5 they are 0, where it is 1, and a negative number; h >> 1 is right. Of an array of uint64, % 3 and + 1 are float64. `np.uint64(31)` on both sides keeps uint64
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q numba==0.68.1 numpy==2.3.5
cd "$work"
cat > hashes.py <<'PYTHON'
import numba
import numpy as np


@numba.njit
def parts(h):
    return h % 3, h // 2, h >> 1, h % np.uint64(3)


@numba.njit
def hashed(tokens):
    h = np.uint64(14695981039346656037)
    for token in tokens:
        h = h * 31 + token
    return h


@numba.njit
def kept(tokens):
    h = np.uint64(14695981039346656037)
    for token in tokens:
        h = h * np.uint64(31) + np.uint64(token)
    return h


@numba.njit
def remainders(array):
    return array % 3


number, tokens = np.uint64(2**63 + 5), np.array([1, 2, 3])
seen, python = parts(number), (int(number) % 3, int(number) // 2, int(number) >> 1, int(number) % 3)
wide, whole = hashed(tokens), kept(tokens)
kinds = remainders(np.array([number])).dtype.name, (np.array([number]) % 3).dtype.name
right = 14695981039346656037
for token in (1, 2, 3):
    right = (right * 31 + token) % 2**64
print("numba", numba.__version__, "2^63 + 5: % 3, // 2, >> 1, % uint64(3):", seen, "Python:", python, "| hash:", wide, whole, right, "| array % 3:", kinds)
wrong = (0, -4611686018427387902, 4611686018427387906, 1)
raise SystemExit(seen != wrong or not isinstance(wide, float) or whole != right or kinds != ("float64", "uint64"))
PYTHON
"$work/venv/bin/python" hashes.py
