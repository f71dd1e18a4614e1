#!/bin/sh
# transformers 5.23.0, torch forms of Zamba 2 and Nemotron-H: a whole text against one token after another
# Guess: equal but for rounding, as in Mamba 2 and Falcon-H1
# Seen: the form for many tokens raises each time step to time_step_min, the one for a single token does not: logits differ by 1e-3 at the usual 0.001, and by tenths at 0.5 (config.json's time_step_limit, which is (0, inf), is not read)
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
small |= dict(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, chunk_size=8, time_step_max=1.0)
families = {
    "zamba2": dict(mamba_d_state=8, n_mamba_heads=8, mamba_headdim=16, mamba_ngroups=1, use_mamba_kernels=False,
                   hybrid_layer_ids=[1], layers_block_type=["mamba", "hybrid"]),
    "nemotron_h": dict(hybrid_override_pattern="M*", mamba_num_heads=8, mamba_head_dim=16, n_groups=2,
                       ssm_state_size=16, head_dim=16),
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, head_dim=16),
}
seen = {}
with torch.no_grad():
    for name, own in families.items():
        for least in (0.001, 0.5):
            torch.manual_seed(0)
            config = CONFIG_MAPPING[name](**{**small, **own, "time_step_min": least})
            model = AutoModelForCausalLM.from_config(config).float().eval()
            for weight in model.parameters():
                if weight.dim() > 1:
                    torch.nn.init.normal_(weight, std=0.15)
            ids, cache, made = torch.randint(3, 96, (1, 20)), None, []
            for place in range(20):
                more = {} if cache is None else {"past_key_values": cache}
                out = model(ids[:, place:][:, :1], use_cache=True, position_ids=torch.tensor([[place]]), **more)
                cache = out.past_key_values
                made.append(out.logits)
            off = (torch.cat(made, 1) - model(ids, use_cache=False).logits).abs().max().item()
            seen[name, least] = off
            print(transformers.__version__, name, "time_step_min", least, "off by %.0e" % off)
wrong = [key for key, off in seen.items() if off > 5e-2]
raise SystemExit(wrong != [("zamba2", 0.5), ("nemotron_h", 0.5)] or max(seen["falcon_h1", 0.5], seen["falcon_h1", 0.001]) > 1e-4)
PYTHON
