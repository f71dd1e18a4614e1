#!/bin/sh
# compressed-tensors 0.20.0 with transformers 5.23.0: a checkpoint of preset W4A16_ASYM, written by its ModelCompressor
# Guess: from_pretrained reads it, as it reads W4A16
# Seen: refused, since zeros are stored eight to an int32 and expected one by one (size mismatch); with CompressedTensorsConfig(dequantize=True) the same files are read well
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0 accelerate==1.15.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
shape = dict(vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
shape |= dict(num_attention_heads=2, num_key_value_heads=2)
seen = {}
for preset in ("W4A16", "W4A16_ASYM"):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape)).bfloat16()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"g": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.detach().unflatten(1, (-1, scheme.weights.group_size))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            module.weight_scale.data = scale.to(module.weight_scale.dtype)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
    wanted = model.model.layers[0].mlp.up_proj.weight.detach().float().clone()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(preset)
    compressor.update_config(preset)
    for how in (None, CompressedTensorsConfig(dequantize=True)):
        try:
            read = AutoModelForCausalLM.from_pretrained(preset, **({"quantization_config": how} if how else {}))
            read(torch.ones(1, 2, dtype=torch.int64))  # widens what is packed
            found = read.model.layers[0].mlp.up_proj.weight.detach().float()
            seen.setdefault(preset, []).append((found - wanted).abs().max().item() < 0.01)
        except RuntimeError as error:
            seen.setdefault(preset, []).append(str(error)[:60])
print(transformers.__version__, "read as it is, and with dequantize:", seen)
asymmetric = seen["W4A16_ASYM"]
raise SystemExit(seen["W4A16"] != [True, True] or asymmetric[0] is True or asymmetric[1] is not True)
PYTHON
