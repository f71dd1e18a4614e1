#!/bin/sh
# mlx-lm 0.32.2 with mlx 0.32.4, on a CPU: the first four tokens that a RotatingKVCache (max_kv_size) keeps
# Guess: they are kept to be seen (attention sinks), by tokens of a prompt and by those that follow
# Seen: within a call of several tokens they lie outside the window as any others do (make_mask knows nothing of keep; models/cache.py); a single token sees them. So logits behind 40 tokens differ between one call and forty, with keep=4 and not with keep=0
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
from mlx_lm.models import llama
from mlx_lm.models.cache import RotatingKVCache

mx.set_default_device(mx.cpu)
mx.random.seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
model = llama.Model(llama.ModelArgs(model_type="llama", num_hidden_layers=1, rms_norm_eps=1e-5, vocab_size=64, **sizes))
model.update(tree_map(lambda x: 0.3 * mx.random.normal(x.shape) if x.ndim > 1 else x, model.parameters()))
prompt = [(7 * i + 3) % 61 for i in range(40)]


def logits(tokens, length, keep):
    cache = [RotatingKVCache(16, keep=keep)]
    for start in range(0, 40, length):
        out = model(mx.array([tokens[start : start + length]]), cache=cache)
    return out[0, -1]


def differ(one, other):
    return mx.abs(one - other).max().item() > 1e-3


moved = {keep: differ(logits(prompt, 40, keep), logits(prompt, 1, keep)) for keep in (0, 4)}
other = [50, *prompt[1:]]
sees = {length: differ(logits(prompt, length, 4), logits(other, length, 4)) for length in (40, 20, 1)}
print("mlx-lm", version("mlx-lm"), "one call and forty differ, by keep:", moved, "| the last token sees the first, by tokens a call:", sees)
raise SystemExit(moved != {0: False, 4: True} or sees != {40: False, 20: False, 1: True})
PYTHON
