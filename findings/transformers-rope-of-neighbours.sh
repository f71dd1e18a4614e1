#!/bin/sh
# transformers 5.23.0, torch 2.13.0, on a CPU: a Llama of random weights with rope_type longrope (as Phi 3 and 4 mini have) and dynamic (as InternLM 2), 32 positions before they change
# Guess: a row of a padded batch has the logits that it has alone, and tokens behind a cache those of one pass over all of them
# Seen: one set of frequencies is taken for the whole call, by its largest position: 10 tokens beside a row of 60 are turned as if they were long, and have other logits than alone. Of 60 tokens, one pass turns all of them as long, step by step the first 32 stay in the cache as short, so from the second token on the logits differ. yarn, linear and llama3 do neither
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.23.0 torch==2.13.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

RULES = {
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}, "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32}, "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
tokens = torch.randint(0, 64, (1, 60), generator=torch.Generator().manual_seed(1))
short = tokens[:, :10]
padded = torch.cat([tokens, torch.cat([torch.zeros(1, 50, dtype=torch.int64), short], 1)])
mask = torch.ones_like(padded)
mask[1, :50] = 0
positions = (mask.cumsum(-1) - 1).clamp(min=0)


def model(rule):
    torch.manual_seed(0)
    length = 32 if rule in ("dynamic", "linear") else 128
    parameters = {"rope_type": rule, "rope_theta": 10000.0, **RULES[rule]}
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=length, initializer_range=0.5, rope_parameters=parameters)).eval()


def differ(one, other):
    return (one - other).abs().max().item() > 0.1


seen = {}
with torch.no_grad():
    for rule in RULES:
        alone, beside = model(rule)(short).logits[0], model(rule)(padded, attention_mask=mask, position_ids=positions).logits[1, 50:]
        once, stepped = model(rule)(tokens).logits[0], model(rule)
        made = stepped(tokens[:, :20], use_cache=True)
        steps = [made.logits[0]]
        for n in range(20, 60):
            made = stepped(tokens[:, n : n + 1], past_key_values=made.past_key_values, use_cache=True)
            steps.append(made.logits[0])
        seen[rule] = differ(alone, beside), differ(once, torch.cat(steps))
print("transformers", transformers.__version__, "other logits beside a long row, and behind a cache:", seen)
raise SystemExit(seen != {rule: (rule in ("longrope", "dynamic"),) * 2 for rule in RULES})
PYTHON
