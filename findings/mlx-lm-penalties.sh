#!/bin/sh
# mlx-lm 0.32.2 with mlx 0.32.4, on a CPU: repetition_penalty in generate_step and speculative_generate_step, greedily
# Guess: it counts the prompt in both, so a prompt that is partly in prompt_cache, or a draft model, changes no token
# Seen: it counts what this call feeds. Behind 8 of 10 tokens in prompt_cache it counts the last 2 alone; with a draft model the last 1 alone (its prefill does not pass tokens on; generate.py); a processor that only looks gives the same tokens in all three
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.23.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

mx.set_default_device(mx.cpu)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def build(seed):
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(model_type="llama", num_hidden_layers=1, rms_norm_eps=1e-5, vocab_size=64, **sizes))
    model.update(tree_map(lambda x: 0.3 * mx.random.normal(x.shape) if x.ndim > 1 else x, model.parameters()))
    return model


model, draft = build(0), build(1)
prompt = mx.array([(7 * i + 3) % 61 for i in range(10)])


def seen_first(start):
    """The tokens that a processor is shown at the first new token, and those made."""
    shown = []

    def record(tokens, logits):
        shown.append(tokens.tolist())
        return logits

    if start == "draft":
        steps = speculative_generate_step(prompt, model, draft, max_tokens=8, logits_processors=[record])
        made = [token for token, _, _ in steps]
        return min(map(len, shown)), made
    cache = make_prompt_cache(model)
    if start:
        model(prompt[None, :start], cache=cache)
    made = [token for token, _ in generate_step(prompt[start:], model, max_tokens=8, prompt_cache=cache, logits_processors=[record])]
    return min(map(len, shown)), made


cases = {start: seen_first(start) for start in (0, 8, "draft")}
print("mlx-lm", version("mlx-lm"), "tokens that a processor is shown first, by entries in the cache:", {name: count for name, (count, _) in cases.items()})
same = all(made == cases[0][1] for _, made in cases.values())
raise SystemExit({name: count for name, (count, _) in cases.items()} != {0: 10, 8: 2, "draft": 1} or not same)
PYTHON
