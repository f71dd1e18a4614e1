#!/bin/sh
# transformers 5.23.0 reads FP8 weights in blocks of 128 x 128 (quant_method fp8) without a GPU: matrices whose sizes are no multiples of 128, and one without its scales
# Guess: the last blocks are smaller, as weight_block_size says; a weight without weight_scale_inv is refused
# Seen: the size of a block is that of the matrix divided by the count of scales: of 192 rows the second scale begins at row 96, silently; 320 rows are refused; without scales the FP8 numbers are the weights
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}


def read(width, with_scales=True):
    """Ones in FP8; the scale of block i of rows is i + 1."""
    shape = dict(vocab_size=64, hidden_size=128, intermediate_size=width, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=64)
    stored = {}
    for name, tensor in Qwen3ForCausalLM(Qwen3Config(**shape)).state_dict().items():
        stored[name] = tensor.clone()
        if tensor.dim() == 2 and "layers" in name:
            rows, columns = (-(-size // 128) for size in tensor.shape)
            stored[name] = torch.ones(tensor.shape).to(torch.float8_e4m3fn)
            if with_scales or "up_proj" not in name:
                stored[f"{name}_scale_inv"] = torch.arange(1.0, rows + 1)[:, None].repeat(1, columns)
    Qwen3Config(**shape, quantization_config=scheme, architectures=["Qwen3ForCausalLM"]).save_pretrained(".")
    save_file(stored, "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(".", dtype=torch.float32)
    return model.model.layers[0].mlp.up_proj.weight[:, 0].tolist()


seen = [read(256).count(1.0), read(192).count(1.0), read(256, with_scales=False).count(1.0)]
print(transformers.__version__, "rows with the first scale: of 256 rows", seen[0], "; of 192 rows", seen[1], "; without scales", seen[2])
try:
    read(320)
    refused = False
except Exception as error:
    print("320 rows:", type(error).__name__, str(error)[:200])
    refused = True
raise SystemExit(not (seen == [128, 96, 256] and refused))
PYTHON
