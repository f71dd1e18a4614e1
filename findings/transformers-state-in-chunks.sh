#!/bin/sh
# transformers 5.23.0: a prompt in two parts of several tokens, with the cache between them
# Guess: the logits are those of the whole prompt, in every family that has a cache
# Seen: Mamba, Falcon-Mamba and Jamba begin the second part with an empty state, without a word; single tokens go on well, and so do Mamba 2, LFM2, Falcon-H1 and Qwen3-Next in parts of any size
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
heads = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
experts = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32)
families = {
    "mamba": dict(state_size=8),
    "falcon_mamba": dict(state_size=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, use_mamba_kernels=False, mamba_d_state=8),
    "mamba2": dict(num_heads=8, head_dim=16, n_groups=2, state_size=16, chunk_size=8),
    "lfm2": dict(layer_types=["conv", "full_attention"], block_ff_dim=64),
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, head_dim=16),
    "qwen3_next": dict(**heads, **experts, head_dim=16, layer_types=["linear_attention", "full_attention"]),
}


@torch.no_grad()
def logits(model, ids, parts):
    """Of all parts, each with the cache of those before it."""
    made, more = [], {}
    for part in ids.split(parts, dim=1):
        out = model(part, use_cache=True, **more)
        name = "past_key_values" if "past_key_values" in out else "cache_params"
        more = {name: out[name]}
        made.append(out.logits)
    return torch.cat(made, 1)


seen = {}
for name, own in families.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**{**small, **own})).float().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    ids = torch.randint(3, 96, (1, 20))
    whole = logits(model, ids, [20])
    seen[name] = [(logits(model, ids, parts) - whole).abs().max().item() for parts in ([12, 8], [12] + 8 * [1])]
    print(transformers.__version__, name, "off by %.0e in 12 + 8, by %.0e in 12 + 8 x 1" % tuple(seen[name]))
lost = [name for name, (parts, _) in seen.items() if parts > 1e-2]
right = all(one < 1e-3 for _, one in seen.values())
raise SystemExit(lost != ["mamba", "falcon_mamba", "jamba"] or not right)
PYTHON
