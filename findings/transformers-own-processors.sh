#!/bin/sh
# transformers 5.23.0, on a CPU: a LogitsProcessor of one's own beside temperature and top_k in generate
# Guess: it comes last, behind those built from the config, and what it returns is drawn from
# Seen: it comes behind the penalties and before temperature, top_k and top_p: it is shown all logits as they are, and one that gives a token 100 more brings it into a top_k=2 that it was not in; one that gives 6 more at a temperature of 3 gives 2
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

FOLLOWS = {2: {2: 12, 3: 9, 4: 5, 5: 3}}  # logits of a token behind a token; others have 0
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, tie_word_embeddings=False, **sizes)).eval()
with torch.no_grad():  # logits are a table: the layer adds nothing, and each token is a direction of its own
    for name, parameter in model.named_parameters():
        parameter.fill_(float("norm" in name))
    model.model.embed_tokens.weight.copy_(torch.eye(32))
    for one, row in FOLLOWS.items():
        for other, logit in row.items():
            model.lm_head.weight[other, one] = logit / 32**0.5


class Add(LogitsProcessor):
    """Adds to one token's logit, and keeps what it was shown."""

    def __init__(self, token, more):
        self.token, self.more = token, more

    def __call__(self, input_ids, scores):
        self.shown = [round(score, 3) for score in scores[0, 2:6].tolist()]
        scores = scores.clone()
        scores[:, self.token] += self.more
        return scores


def run(processor):
    ids = torch.tensor([[2]])
    settings = {"do_sample": True, "temperature": 3.0, "top_k": 2, "repetition_penalty": 2.0, "pad_token_id": 0, "max_new_tokens": 1}
    results = {"return_dict_in_generate": True, "output_scores": True, "logits_processor": LogitsProcessorList([processor])}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **results)
    return processor.shown, [round(score, 3) for score in out.scores[0][0, 2:6].tolist()]


seen = {"adds 0": run(Add(5, 0.0)), "adds 100": run(Add(5, 100.0)), "adds 6": run(Add(3, 6.0))}
print("transformers", transformers.__version__, "logits of tokens 2 to 5, as shown, and as drawn from:", seen)
shown, none = [6.0, 9.0, 5.0, 3.0], float("-inf")
wanted = {"adds 0": [2.0, 3.0, none, none], "adds 100": [none, 3.0, none, 34.333], "adds 6": [2.0, 5.0, none, none]}
raise SystemExit(seen != {name: (shown, drawn) for name, drawn in wanted.items()})
PYTHON
