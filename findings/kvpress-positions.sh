#!/bin/sh
# kvpress 0.5.5, with the transformers 5.2.0 that it asks for: positions of tokens behind a compressed prompt
# Guess: behind a prompt of 100 tokens the next one is at position 100, whatever the press left
# Seen: by model.generate it is; by a call of the model with the compressed cache it is at 50, the number of entries left, unless position_ids are given
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 kvpress==0.5.5 transformers==5.2.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from kvpress import KnormPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)).eval()
positions = []
model.model.rotary_emb.register_forward_pre_hook(lambda module, args, named: positions.append(named["position_ids"][0, -1].item()), with_kwargs=True)
prompt, press, seen = torch.arange(100)[None] % 64, KnormPress(0.5), {}
with torch.no_grad():
    for name, settings in (("call", {}), ("call with position_ids", {"position_ids": torch.tensor([[100]])})):
        cache = DynamicCache()
        with press(model):
            model(prompt, past_key_values=cache)
        model(prompt[:, :1], past_key_values=cache, **settings)
        seen[name] = positions[-2:]
    with press(model):
        model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=DynamicCache(), max_new_tokens=2, do_sample=False, pad_token_id=0)
    seen["generate"] = positions[-2:]
print(version("kvpress"), version("transformers"), "last position of the prompt, and the next:", seen)
raise SystemExit(seen != {"call": [99, 50], "call with position_ids": [99, 100], "generate": [99, 100]})
PYTHON
