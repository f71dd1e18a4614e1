#!/bin/sh
# torch 2.13.0, on a CPU: torch.rand in bfloat16 and float16
# Guess: float32 numbers rounded: 0 is as rare as there (never in a million), and 1, which is not in [0, 1), comes now and then
# Seen: 0 comes 1 in 512 times in bfloat16 and 1 in 4096 in float16: what would be rounded up to 1 is made 0. So log(rand) is -inf that often, and a sampler by Gumbel noise, -log(-log(u)), leaves the token out that often; exponential_() has no 0. The page of torch.rand says "uniform on [0, 1)"
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch

torch.manual_seed(0)
count = 1 << 22
seen = {}
for kind in (torch.bfloat16, torch.float16, torch.float32):
    numbers = torch.rand(count, dtype=kind)
    others = torch.empty(count, dtype=kind).exponential_()
    beside = ((numbers > 0) & (numbers < 1 / 512)).sum().item()
    seen[kind] = (numbers == 0).sum().item(), (numbers == 1).sum().item(), beside, (others == 0).sum().item()
    print(torch.__version__, kind, "zeros, ones and numbers below 1/512 of", count, "uniform ones:", seen[kind][:3], "| zeros of exponential_():", seen[kind][3])
zeros = [counts[0] for counts in seen.values()]
expected = [abs(zeros[0] * 512 / count - 1) < 0.1, abs(zeros[1] * 4096 / count - 1) < 0.2, zeros[2] < 10]
raise SystemExit(not all(expected) or any(counts[1] or counts[3] for counts in seen.values()))
PYTHON
