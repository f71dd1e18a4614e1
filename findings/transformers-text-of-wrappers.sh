#!/bin/sh
# transformers 5.23.0: Gemma4ForCausalLM.from_pretrained, as its docstring calls it, of what Gemma4ForConditionalGeneration saves
# Guess: it takes the weights of the text part, as Qwen3_5ForCausalLM does of its wrapper's file, or raises
# Seen: it takes none, draws all at random and raises nothing; Gemma3ForCausalLM too. With key_mapping Gemma 4 takes all, Gemma 3 still none
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
small = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16)
small |= dict(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
sight = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, depth=1)
sight |= dict(num_heads=2, out_hidden_size=64, patch_size=14, image_size=28, head_dim=16)
families = {
    "Gemma4": dict(hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"]),
    "Gemma3": {},
    "Qwen3_5": dict(layer_types=["linear_attention", "full_attention"]),
}
prefix = {r"^model\.language_model\.": "model."}
ids, seen = torch.arange(3, 23)[None], {}
for name, own in families.items():
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name.lower()](text_config={**small, **own}, vision_config=sight)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(name)
    kind = getattr(transformers, f"{name}ForCausalLM")
    for how in ({}, {"key_mapping": prefix}):
        text, info = kind.from_pretrained(name, output_loading_info=True, **how)
        with torch.no_grad():
            wanted = whole(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            off = (text.eval()(ids).logits - wanted).abs().max().item()
        missing, count = len(info["missing_keys"]), len(text.state_dict())
        print(transformers.__version__, kind.__name__, *how, f"{missing} of {count} missing, logits off by {off:.1e}")
        seen[name, bool(how)] = missing == 0 and off < 1e-5
wrong = {key for key, taken in seen.items() if not taken}
raise SystemExit(wrong != {("Gemma4", False), ("Gemma3", False), ("Gemma3", True)})
PYTHON
