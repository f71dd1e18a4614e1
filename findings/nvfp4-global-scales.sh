#!/bin/sh
# nvidia-modelopt 0.47.0, torchao 0.18.0, compressed-tensors 0.20.0, torch 2.13.0, on a CPU: the scale of a whole matrix in NVFP4
# Guess: one number under three names (weight_scale_2, per_tensor_scale, weight_global_scale), that a weight is multiplied by: code * block's scale * it
# Seen: the bytes of codes and scales of blocks are the same, and compressed-tensors' number is the reciprocal: 2688 / largest, which one divides by, where the others hold largest / 2688. Nothing in the tensors says which: read the wrong way, all weights are off by 10^9 and more. Without per_tensor_scale torchao's to_nvfp4 makes 0 of a block whose largest number is below a quarter of 2^-6: its least scale is 2^-6
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
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from importlib.metadata import version
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

torch.manual_seed(0)
weight = torch.randn(4, 32) * 0.02
largest = weight.abs().max().item()
held, scale, second = NVFP4QTensor.quantize(weight, 16)
by_modelopt = held._quantized_data, scale.float(), second.item()
held = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(weight.abs().max()))
by_torchao = held.qdata.view(torch.uint8), held.scale.float(), held.per_tensor_scale.item()
scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
groups, whole = weight.reshape(4, 2, 16), generate_gparam(weight.min(), weight.max())
scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=whole)
packer = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
held = packer.compress({"weight": weight, "weight_scale": scale, "weight_global_scale": whole}, scheme)
by_compressed_tensors = held["weight_packed"], held["weight_scale"].float(), whole.item()
small = NVFP4Tensor.to_nvfp4(torch.full((1, 16), 0.0035)).dequantize(torch.float32)
libraries = {"nvidia-modelopt": by_modelopt, "torchao": by_torchao, "compressed-tensors": by_compressed_tensors}
for name, (codes, scales, number) in libraries.items():
    print(name, version(name), "scale of the whole:", number, "of the first blocks:", scales.flatten()[:3].tolist(), "first codes:", codes[0, :3].tolist())
print("largest / 2688:", largest / 2688, "2688 / largest:", 2688 / largest, "| 0.0035 in torchao without it:", small[0, 0].item())
same = [all(torch.equal(each[part].flatten(), by_modelopt[part].flatten()) for each in (by_torchao, by_compressed_tensors)) for part in (0, 1)]
near = [abs(number * factor - 1) < 1e-3 for number, factor in ((by_modelopt[2], 2688 / largest), (by_torchao[2], 2688 / largest), (by_compressed_tensors[2], largest / 2688))]
print("same codes and scales of blocks:", same)
raise SystemExit(not all(near) or not all(same) or small.any().item())
PYTHON
