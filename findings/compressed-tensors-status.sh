#!/bin/sh
# transformers 5.23.0 with compressed-tensors 0.20.0: a quantization_config without quantization_status
# Guess: tensors weight_packed and weight_scale are read, whatever the status
# Seen: without quantization_status compressed the weights are drawn at random, with a report of missing tensors
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.23.0 compressed-tensors==0.20.0 accelerate==1.15.0 torch==2.13.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
import compressed_tensors
import transformers

shape = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
scheme = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
model = LlamaForCausalLM(LlamaConfig(**shape))
stored = {}
for name, tensor in model.state_dict().items():
    if tensor.dim() < 2 or "layers" not in name:
        stored[name] = tensor.clone()
        continue
    base, (outputs, inputs) = name.removesuffix("weight"), tensor.shape
    levels = torch.full((outputs, inputs), 9, dtype=torch.int64)  # one above the zero of 8
    words = sum(levels[:, n::8] << (4 * n) for n in range(8))
    stored[base + "weight_packed"] = torch.where(words >= 2**31, words - 2**32, words).int()
    stored[base + "weight_scale"] = torch.full((outputs, 1), 0.5)
    stored[base + "weight_shape"] = torch.tensor([outputs, inputs])
seen = []
for status in (None, "compressed"):
    config = LlamaConfig(**shape, quantization_config={**scheme, **({"quantization_status": status} if status else {})}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(".")
    save_file(stored, "model.safetensors", {"format": "pt"})
    read = AutoModelForCausalLM.from_pretrained(".", dtype=torch.float32)
    read(torch.ones(1, 3, dtype=torch.int64))  # its first step unpacks
    weight = read.model.layers[0].mlp.down_proj.weight
    seen.append(bool((weight == 0.5).all()))
    print("status", status, "read as stored:", seen[-1])
print("transformers", transformers.__version__, "compressed-tensors", compressed_tensors.__version__)
raise SystemExit(seen != [False, True])
PYTHON
