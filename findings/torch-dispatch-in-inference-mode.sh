#!/bin/sh
# torch 2.13.0: operators that a TorchDispatchMode sees under inference_mode and under no_grad
# Guess: the same ones, since neither records gradients
# Seen: under inference_mode it sees composite operators (aten.reshape, aten.to, aten.matmul) and not the copies and products that they are made of; under no_grad it sees these parts. Who counts kernels or bytes by such a mode counts too few
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.overloadpacket._qualified_op_name)
        return operator(*args, **(kwargs or {}))


x = torch.arange(6.0).view(2, 3)
found = {}
for name in ("no_grad", "inference_mode"):
    with getattr(torch, name)(), Seen() as seen:
        x.t().reshape(6)
        x.to(torch.float64)
        x @ x.t()
    found[name] = seen.names
    print(torch.__version__, name, *found[name])
copies = {name: sum("copy" in each or "clone" in each for each in names) for name, names in found.items()}
raise SystemExit(not (copies["no_grad"] >= 2 and "aten::reshape" in found["inference_mode"] and copies["inference_mode"] < copies["no_grad"]))
PYTHON
