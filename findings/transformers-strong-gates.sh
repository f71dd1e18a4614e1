#!/bin/sh
# transformers 5.23.0, torch forms of the gated delta rule (Qwen3-Next): one gate that forgets everything, 53 tokens before the end of a chunk
# Guess: both forms forget, and agree to 1e-6, since gates of later tokens do not see it
# Seen: in the chunked form later decays are differences of sums, so a log-gate of -1e5 costs three digits of state and -inf makes NaN; the recurrent form is exact
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import math

import torch
import transformers
from transformers.models.qwen3_next import modeling_qwen3_next as forms

torch.manual_seed(0)
query, key, value = (torch.randn(1, 64, 2, 16) for _ in range(3))
beta, seen = torch.rand(1, 64, 2), []
for strong in (-0.01, -1000.0, -1e5, -math.inf):
    gates = torch.full((1, 64, 2), -0.01)
    gates[:, 10] = strong
    given = dict(g=gates, beta=beta, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
    _, one = forms.torch_chunk_gated_delta_rule(query, key, value, **given)
    _, other = forms.torch_recurrent_gated_delta_rule(query, key, value, **given)
    assert other.isfinite().all()
    seen.append((one - other).abs().max().item())
    print(transformers.__version__, "log-gate", strong, "-> states differ by", seen[-1])
raise SystemExit(not (seen[0] < 1e-5 and seen[2] > 1e-3 and math.isnan(seen[3])))
PYTHON
