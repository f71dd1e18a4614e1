#!/bin/sh
# transformers 5.23.0: top_k and top_p where the two largest logits are equal
# Guess: top_k=1 leaves one token, and so does a top_p of next to nothing: the one that greedy decoding takes
# Seen: top_k=1 leaves both; top_p=0 leaves one, the last of them, while argmax takes the first; of four equal tokens top_p=0.5 leaves the last two
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper


def kept(warper, logits):
    left = warper(torch.tensor([[1]]), torch.tensor([logits]))
    return torch.nonzero(left[0].isfinite()).flatten().tolist()


pair, four = [0.0, 2.0, 2.0, 1.0], [1.0] * 4
seen = [kept(TopKLogitsWarper(1), pair), kept(TopPLogitsWarper(0.0), pair), kept(TopPLogitsWarper(0.5), four)]
greedy = torch.tensor(pair).argmax().item()
print(transformers.__version__, "top_k=1:", seen[0], "top_p=0:", seen[1], "argmax:", greedy, "top_p=0.5 of four:", seen[2])
raise SystemExit(seen != [[1, 2], [2], [2, 3]] or greedy != 1)
PYTHON
