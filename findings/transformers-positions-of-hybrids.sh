#!/bin/sh
# transformers 5.23.0: the next token of Bamba and MiniMax, given the cache and no position_ids
# Guess: positions go on behind the cache, as in Llama
# Seen: they begin at 0 again where the first layer has no attention, since the cache's length is the first layer's; with position_ids the logits are those of the whole text. Qwen3-Next counts well
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

transformers.logging.set_verbosity_error()
small = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
small |= dict(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
kinds = dict(layer_types=["linear_attention", "full_attention"], num_local_experts=2, num_experts_per_tok=1)
heads = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
families = {
    "bamba": dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, attn_layer_indices=[1]),
    "minimax": dict(**kinds, head_dim=16, block_size=8),
    "qwen3_next": dict(**kinds, **heads, num_experts=2, moe_intermediate_size=32, head_dim=16),
    "llama": {},
}
seen = {}
with torch.no_grad():
    for name, own in families.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**{**small, **own})).float().eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.15)
        ids = torch.randint(3, 96, (1, 20))
        wanted = model(ids, use_cache=False).logits[:, -1]
        for given in ({}, {"position_ids": torch.tensor([[19]])}):
            cache = model(ids[:, :19], use_cache=True).past_key_values
            found = model(ids[:, 19:], past_key_values=cache, **given).logits[:, -1]
            seen.setdefault(name, []).append((found - wanted).abs().max().item())
        print(transformers.__version__, name, "off by %.0e, with position_ids by %.0e" % tuple(seen[name]))
wrong = [name for name, (bare, _) in seen.items() if bare > 1e-2]
raise SystemExit(wrong != ["bamba", "minimax"] or any(given > 1e-3 for _, given in seen.values()))
PYTHON
