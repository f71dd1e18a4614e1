#!/bin/sh
# mlx-lm 0.32.2 with mlx 0.32.4, on a CPU: the prompt cache that generate_step leaves, and quantized_kv_start
# Guess: behind a prompt of 10 and 5 new tokens it holds 14, all but the last, as transformers' does; quantized_kv_start=64 leaves the first 64 entries as they are
# Seen: it holds 15, the last new token too, since the next step has begun (generate.py), so one who feeds that token again has it twice; once 64 are reached, all are quantised
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.23.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

mx.set_default_device(mx.cpu)
mx.random.seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
model = llama.Model(llama.ModelArgs(model_type="llama", num_hidden_layers=1, rms_norm_eps=1e-5, vocab_size=64, **sizes))


def run(prompt, tokens, **settings):
    cache = make_prompt_cache(model)
    made = [token for token, _ in generate_step(mx.arange(prompt) % 64, model, max_tokens=tokens, prompt_cache=cache, **settings)]
    return len(made), cache[0]


made, plain = run(10, 5)
_, quantised = run(40, 40, kv_bits=4, kv_group_size=32, quantized_kv_start=64)
whole = isinstance(quantised, QuantizedKVCache) and len(quantised.keys_and_values()[0]) == 3
held = quantised.keys_and_values()[0][0].shape[2] if whole else None
print("mlx-lm", version("mlx-lm"), "prompt 10, new", made, "held", plain.offset, "| quantised of 80:", held)
raise SystemExit((made, plain.offset, held) != (5, 15, 80))
PYTHON
