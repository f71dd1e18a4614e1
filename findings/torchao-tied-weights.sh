#!/bin/sh
# torchao 0.18.0 (torch 2.13.0, on a CPU): quantize_ with Int8WeightOnlyConfig of a model whose head is its embedding
# Guess: one weight stays one weight: both are quantised, or neither; the model gets smaller, and nbytes says how much
# Seen: the head alone is quantised and the two are one no more, so the model grows: the embedding stays as it was, and the head's int8 comes on top (136,192 bytes become 200,352). nbytes and element_size of a quantised weight are those of the type that it stands for, so a sum over parameters shows no change at all. Its scale is the largest number / 127.5: 1 comes back as 0.996
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torchao==0.18.0 torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 64)
        self.middle, self.head = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embedding.weight


def held(model):
    """Bytes of what the parameters are made of, each once."""
    parts = [[getattr(p, name) for name in p.tensor_data_names] if hasattr(p, "tensor_data_names") else [p] for p in model.parameters()]
    return sum(part.numel() * part.element_size() for each in parts for part in each)


def said(model):
    return sum(parameter.nbytes for parameter in (model.embedding.weight, model.middle.weight, model.head.weight))


model = Model().bfloat16()
before = held(model), said(model), model.head.weight is model.embedding.weight
quantize_(model, Int8WeightOnlyConfig())
after = held(model), said(model), model.head.weight is model.embedding.weight
kinds = type(model.embedding.weight).__name__, type(model.head.weight).__name__
row = torch.nn.Linear(4, 1, bias=False)
row.weight.data = torch.tensor([[1.0, -1.0, 0.5, 0.25]])
quantize_(row, Int8WeightOnlyConfig())
back = [round(n, 3) for n in row.weight.dequantize()[0].tolist()]
print("torchao", version("torchao"), "bytes, nbytes, one weight:", before, "and quantised:", after, kinds, "| of 1, -1, 0.5 and 0.25:", back)
wrong = before != (136192, 264192, True) or after != (200352, 264192, False) or kinds != ("Parameter", "Int8Tensor")
raise SystemExit(wrong or back != [0.996, -0.996, 0.502, 0.251])
PYTHON
