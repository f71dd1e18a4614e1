#!/bin/sh
# rwkv 0.8.32, on a CPU: alpha_frequency and alpha_presence of PIPELINE.generate
# Guess: those of OpenAI's API, as the comments beside them say: a token that came n times loses n * frequency + presence
# Seen: the counts fade by alpha_decay (0.996) with each new token, so a token that came once 100 tokens ago counts 0.67; and digits and spaces are not counted: a token "1", or "12", loses the presence penalty alone, however often it came. A token of token_stop, and the prompt, are not counted either. rwkv/utils.py
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 rwkv==0.8.32 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from rwkv.utils import PIPELINE, PIPELINE_ARGS

NAMES = ["a", "b", "1", "12"]


class Model:
    """Writes `order`, whatever the penalties are, and keeps the logits it gave: the pipeline changes them in place."""

    def __init__(self, order):
        self.order, self.given = order, []

    def forward(self, tokens, state):
        at = len(self.given)
        self.given.append(torch.zeros(4))
        self.given[-1][self.order[at]] = 1000.0
        return self.given[-1], state


def lost(order):
    """What each token had lost at the last step."""
    pipeline = PIPELINE.__new__(PIPELINE)
    pipeline.model, pipeline.encode, pipeline.decode = Model(order), lambda text: [0], lambda tokens: "".join(NAMES[token] for token in tokens)
    pipeline.generate("a", token_count=len(order), args=PIPELINE_ARGS(alpha_frequency=1.0, alpha_presence=10.0))
    last = pipeline.model.given[-1]
    return [round(-float(x - (1000 if token == order[-1] else 0)), 3) for token, x in enumerate(last)]


seen = {"b, then 100 others": lost([1] + [0] * 100)[1], "b three times": lost([1, 1, 1, 0])[1], "1 three times": lost([2, 2, 2, 0])[2], "12 three times": lost([3, 3, 3, 0])[3]}
print("rwkv", version("rwkv"), "lost with frequency 1 and presence 10:", seen)
wanted = {"b, then 100 others": 10 + 0.996**99, "b three times": 10 + 1 + 0.996 + 0.996**2, "1 three times": 10, "12 three times": 10}
raise SystemExit(any(abs(seen[name] - value) > 0.002 for name, value in wanted.items()))
PYTHON
