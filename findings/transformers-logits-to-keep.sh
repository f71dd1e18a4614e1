#!/bin/sh
# transformers 5.23.0: logits_to_keep=5 of a Gemma 4 whose last layers share keys and values, by an attention function of one's own
# Guess: the last five of all logits, whatever the function is called
# Seen: "sdpa" gives these, and so does a tensor of five places; the same function registered as "mine" gives others: queries are cut before the layers that share, and it gets no mask
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, Gemma4ForCausalLM, Gemma4TextConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

transformers.logging.set_verbosity_error()
AttentionInterface.register("mine", sdpa_attention_forward)
AttentionMaskInterface.register("mine", sdpa_mask)
small = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=4, head_dim=16)
small |= dict(num_attention_heads=4, num_key_value_heads=2, global_head_dim=32, num_kv_shared_layers=2)
small |= dict(layer_types=["sliding_attention", "full_attention"] * 2, vocab_size_per_layer_input=96)
torch.manual_seed(0)
model = Gemma4ForCausalLM(Gemma4TextConfig(**small, hidden_size_per_layer_input=16)).eval()
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=0.2)
ids, seen = torch.randint(3, 96, (1, 20)), {}
with torch.no_grad():
    for name in ("sdpa", "eager", "mine"):
        model.set_attn_implementation(name)
        wanted = model(ids, use_cache=False).logits[:, -5:]
        for kept in (5, torch.arange(15, 20)):
            found = model(ids, use_cache=False, logits_to_keep=kept).logits
            seen[name, type(kept).__name__] = off = (found - wanted).abs().max().item()
            print(transformers.__version__, name, f"logits_to_keep={kept}", f"off by {off:.1e}")
raise SystemExit({key for key, off in seen.items() if off > 1e-4} != {("mine", "int")})
PYTHON
