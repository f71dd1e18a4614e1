#!/bin/sh
# compressed-tensors 0.20.0: symmetric scales, and numbers of 3 bits
# Guess: a scale is the largest number / 7 in 4 bits, which keeps that number; ten numbers of 3 bits are in an int32
# Seen: it is the largest / 7.5 (of 8 bits / 127.5), so the largest of a group comes back 7 % smaller; numbers of 3 bits lie without a gap, across the borders of words
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from importlib.metadata import version
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams

seen = {}
for bits in (4, 8):
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="tensor")
    scale, zero = calculate_qparams(torch.tensor([-1.0]), torch.tensor([1.0]), args)
    back = fake_quantize(torch.tensor([1.0, -1.0]), scale, zero, args)
    seen[bits] = [round(1 / scale.item(), 3), *(round(x, 3) for x in back.tolist())]
levels = torch.arange(32).remainder(8) - 4
words = pack_to_int32(levels[None].to(torch.int8), 3)[0]
whole = sum(int(word) % 2**32 << 32 * n for n, word in enumerate(words))
across = [whole >> 3 * n & 7 for n in range(32)] == [int(level) + 4 for level in levels]
print(version("compressed-tensors"), "1 / scale, and 1 and -1 as they come back:", seen, "| 32 numbers of 3 bits:", len(words), "words, one row of bits:", across)
raise SystemExit(seen != {4: [7.5, 0.933, -0.933], 8: [127.5, 0.996, -0.996]} or len(words) != 3 or not across)
PYTHON
