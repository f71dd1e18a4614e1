#!/bin/sh
# torch 2.13.0, on a CPU: a bfloat16 or float16 tensor compared with a Python number
# Guess: compared as numbers: 1.0 > 0.999 is true, whatever the type of the tensor
# Seen: the number is rounded to the tensor's type first, and 0.999 in bfloat16 is 1: 1.0 > 0.999 is false, and 1.0 <= 0.999 true; a 0-dimensional float32 tensor is rounded too, a tensor of one dimension is not. So `cumsum > top_p` in bfloat16 cuts nothing below a full 1 where top_p is 0.999, thresholds go in steps of one in 256, and a request alone, whose top_p is a number, gets other tokens than in a batch whose top_p is a tensor. torch.compile does the same
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch

seen = {}
for name, near in (("bfloat16", 0.999), ("float16", 0.9999)):
    x = torch.ones(1, dtype=getattr(torch, name))
    numbers = {"a number": near, "0-dimensional": torch.tensor(near), "[number]": torch.tensor([near])}
    seen[name] = {kind: (x > number).item() for kind, number in numbers.items()}
sums = torch.tensor([0.9961, 1.0, 1.0], dtype=torch.bfloat16)
cut = {"a number": int((sums > 0.999).sum()), "[number]": int((sums > torch.tensor([0.999])).sum())}
print(torch.__version__, "1 > 0.999 (0.9999 in float16):", seen, "| of running sums 0.996, 1, 1 those above 0.999:", cut)
wrong = {"a number": False, "0-dimensional": False, "[number]": True}
raise SystemExit(seen != {"bfloat16": wrong, "float16": wrong} or cut != {"a number": 0, "[number]": 2})
PYTHON
