#!/bin/sh
# safetensors 0.8.0, torch 2.13.0: complex tensors and their parts, as tables of rotations (freqs_cis) are kept
# Guess: what is saved comes back, or is refused, as numpy() refuses it
# Seen: torch keeps x.conj(), and the imaginary part of it, as x with a bit that says so; safetensors writes the memory as it lies: 1 - 2i comes back as 1 + 2i, and the float32 tensor [-2] as [2], though is_contiguous() is true and .contiguous() changes nothing. A rotation turns the other way, and nothing is said. resolve_conj() and resolve_neg() first; torch.save keeps them right
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 safetensors==0.8.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import io

import safetensors
import torch
from safetensors.torch import load, save

rotation = torch.tensor([1 + 2j]).conj()
part = rotation.imag.contiguous()


def by_torch(tensor):
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def by_safetensors(tensor):
    return load(save({"it": tensor}))["it"]


back, right = [by_safetensors(rotation), by_safetensors(part)], [by_safetensors(rotation.resolve_conj()), by_safetensors(part.resolve_neg())]
seen = [[tensor.item() for tensor in pair] for pair in ((rotation, part), back, right, (by_torch(rotation), by_torch(part)))]
print("safetensors", safetensors.__version__, "torch", torch.__version__, "before, after, after resolve_*, after torch.save:", seen)
raise SystemExit(seen != [[1 - 2j, -2.0], [1 + 2j, 2.0], [1 - 2j, -2.0], [1 - 2j, -2.0]])
PYTHON
