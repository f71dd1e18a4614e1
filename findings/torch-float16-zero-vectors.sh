#!/bin/sh
# torch 2.13.0, on a CPU: normalize and cosine_similarity of a vector of zeros
# Guess: 0 in every type, which their eps is for
# Seen: 0 in float32 and bfloat16, NaN in float16, which holds neither 1e-12 nor 1e-8; layer_norm and rms_norm give 0 in all three
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from torch.nn import functional as F

seen = {}
for kind in (torch.float32, torch.bfloat16, torch.float16):
    zero = torch.zeros(4, dtype=kind)
    results = F.normalize(zero, dim=0)[0], F.cosine_similarity(zero, zero, dim=0), F.layer_norm(zero, (4,))[0], F.rms_norm(zero, (4,))[0]
    seen[str(kind).removeprefix("torch.")] = [str(x.item()) for x in results]
print(torch.__version__, "normalize, cosine_similarity, layer_norm, rms_norm of zeros:", seen)
raise SystemExit(list(seen.values()) != [["0.0"] * 4, ["0.0"] * 4, ["nan", "nan", "0.0", "0.0"]])
PYTHON
