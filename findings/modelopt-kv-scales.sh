#!/bin/sh
# nvidia-modelopt 0.47.0 (torch 2.13.0, on a CPU): the scales of an FP8 KV cache that its export writes
# Guess: what calibration found: the largest number / 448, also below 1
# Seen: at least 1: keys of at most 22.4 are simulated with a scale of 0.05, and exported with 1, so what was measured is not what is served: with 0.5 as the largest number 0.0005 is kept in the simulation, and is 0 at a scale of 1. An INT8 scale is not raised, and clamp_fp8_scales=False of get_kv_cache_scaling_factor leaves both as they are
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q nvidia-modelopt==0.47.0 torch==2.13.0 numpy==2.3.5 requests==2.34.2 huggingface_hub==2.4.0
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import torch
from modelopt.torch.export.quant_utils import get_kv_cache_scaling_factor
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer


def attention(largest, bits):
    module = torch.nn.Module()
    for name in ("k_bmm_quantizer", "v_bmm_quantizer"):
        quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=bits))
        quantizer.amax = torch.tensor(largest)
        setattr(module, name, quantizer)
    return module


seen = {}
for largest, bits in ((0.5, (4, 3)), (22.4, (4, 3)), (896.0, (4, 3)), (0.5, 8)):
    module = attention(largest, bits)
    scales = [get_kv_cache_scaling_factor(module), get_kv_cache_scaling_factor(module, clamp_fp8_scales=False)]
    seen[largest, bits] = [round(each[0].item(), 4) for each in scales]
small = torch.tensor([0.0005])
simulated = round(attention(0.5, (4, 3)).k_bmm_quantizer(small).item(), 6)
served = small.to(torch.float8_e4m3fn).float().item()
print("nvidia-modelopt", version("nvidia-modelopt"), "exported and calibrated:", seen, "| 0.0005 simulated:", simulated, "at a scale of 1:", served)
wanted = {(0.5, (4, 3)): [1.0, 0.0011], (22.4, (4, 3)): [1.0, 0.05], (896.0, (4, 3)): [2.0, 2.0], (0.5, 8): [0.0039, 0.0039]}
raise SystemExit(seen != wanted or simulated != 0.000488 or served != 0)
PYTHON
