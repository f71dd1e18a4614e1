#!/bin/sh
# torchao 0.18.0, nvidia-modelopt 0.47.0, compressed-tensors 0.20.0, torch 2.13.0, on a CPU: one block in MXFP4
# Guess: the same bytes from all: OCP's exponent, floor(log2(largest)) - 2, and halves to the even number
# Seen: three answers for one block whose largest number is 7. torchao, as it is set up, does as guessed, and 7 comes back as 6; compressed-tensors takes the next exponent from 7 on and gives 8; modelopt takes it from just above 6 on, and rounds halves towards zero: 7, 3.5 and 5 become 6, 3 and 4, and where all take one exponent .75, 2.5 and 3.5 are .5, 2 and 3 in modelopt, 1, 2 and 4 in the others. modelopt writes 0 as -0, byte 0x88. So bytes of one packer are no test of another, nor of a kernel. modelopt/torch/quantization/qtensor/mxfp4_tensor.py
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 torchao==0.18.0 nvidia-modelopt==0.47.0 compressed-tensors==0.20.0 transformers==5.23.0 requests==2.34.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from importlib.metadata import version
from modelopt.torch.quantization.qtensor import MXFP4QTensor
from torchao.prototype.mx_formats.mx_tensor import MXTensor


def torchao(x):
    held = MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32)
    return held.qdata.view(torch.uint8), held.scale.view(torch.uint8).item(), held.dequantize(torch.float32)


def modelopt(x):
    held, scale = MXFP4QTensor.quantize(x, 32)
    return held._quantized_data, scale.item(), held.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})


def compressed_tensors(x):
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    scale, _ = calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), scheme.weights)
    packer = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    held = packer.compress({"weight": x, "weight_scale": scale}, scheme)
    return held["weight_packed"], held["weight_scale"].item(), packer.decompress(held, scheme)["weight"].float()


def block(largest):
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([largest, 0.75, 2.5, 3.5, 5, -0.75, 0, 0])
    return x


seen = {}
for packer in (torchao, modelopt, compressed_tensors):
    found = []
    for largest in (7.0, 6.0):
        data, exponent, back = packer(block(largest))
        found.append((exponent - 127, back[0, :6].tolist(), hex(data[0, 3].item())))
    seen[packer.__name__] = found
    print(packer.__name__, version(packer.__name__ if packer is not modelopt else "nvidia-modelopt"), "exponent, numbers, byte of two zeros, for a largest number of 7 and of 6:", found)
even, down = (0, [6, 1, 2, 4, 4, -1], "0x0"), (0, [6, 0.5, 2, 3, 4, -0.5], "0x88")
wanted = {"torchao": [even, even], "modelopt": [(1, [6, 1, 2, 3, 4, -1], "0x88"), down], "compressed_tensors": [(1, [8, 1, 2, 4, 4, -1], "0x0"), even]}
raise SystemExit(seen != wanted)
PYTHON
