#!/bin/sh
# peft 0.21.2, torch 2.13.0, transformers 5.23.0, accelerate 1.15.0: add_weighted_adapter of two LoRA adapters
# Guess: combination_type="linear" with weights 1 and 1 adds what the adapters add: delta_a + delta_b
# Seen: A's and B's are added apart, so the product has A_a B_b and A_b B_a in it too: of two random adapters the result is as far from the sum as the sum is large, and with .5 and .5 as well; "cat" (of rank r_a + r_b) and "svd" of that rank give the sum. peft/tuners/lora/model.py, _generalized_task_arithmetic_weighted_adapter
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 peft==0.21.2 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import peft
import torch
from peft import LoraConfig, get_peft_model

torch.manual_seed(0)
config = LoraConfig(r=2, lora_alpha=2, target_modules=["0"], init_lora_weights=False)
model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)), config, adapter_name="a")
model.add_adapter("b", config)
layer = model.base_model.model[0]
deltas = [layer.get_delta_weight(name).detach() for name in "ab"]
seen = {}
for kind, more in (("linear", {}), ("cat", {}), ("svd", {"svd_rank": 4})):
    for weights in ([1.0, 1.0], [0.5, 0.5]):
        name = f"{kind}{int(weights[0] * 2)}"
        model.add_weighted_adapter(["a", "b"], weights, name, combination_type=kind, **more)
        wanted = weights[0] * deltas[0] + weights[1] * deltas[1]
        error = (layer.get_delta_weight(name).detach() - wanted).norm() / wanted.norm()
        seen[kind, weights[0]] = round(error.item(), 2)
print("peft", peft.__version__, "distance from the sum, relative to it:", seen)
raise SystemExit(any((error > 0.5) != (kind == "linear") or kind != "linear" and error > 0.01 for (kind, _), error in seen.items()))
PYTHON
