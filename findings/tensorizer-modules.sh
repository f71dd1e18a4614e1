#!/bin/sh
# tensorizer 2.12.1, torch 2.13.0, on a CPU: write_module, and load_into_module of another module
# Guess: as load_state_dict: a missing key or another shape is an error, numbers are cast to the module's type, buffers that are not persistent are not written, tied weights stay tied
# Seen: none of it: the file's tensors take the place of the module's: a layer of 4 inputs has 3 afterwards, a module in float16 has float32 weights, layers that the file lacks keep their random weights, one tied weight becomes two, and a buffer of persistent=False is written and read. TensorDeserializer(dtype=float16) casts integers too: 2049 becomes 2048
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 tensorizer==2.12.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from tensorizer import TensorDeserializer, TensorSerializer


class Module(torch.nn.Module):
    def __init__(self, inputs=3, more=False):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(inputs, 2, bias=False) for _ in range(2))
        self.b.weight = self.a.weight
        self.register_buffer("cache", torch.ones(1), persistent=False)
        if more:
            self.more = torch.nn.Linear(2, 2)


def write(name, call):
    serializer = TensorSerializer(name)
    call(serializer)
    serializer.close()


written = Module()
written.cache.fill_(7)
write("module", lambda serializer: serializer.write_module(written))
write("numbers", lambda serializer: serializer.write_state_dict({"ids": torch.tensor([2049])}))


def load(module):
    TensorDeserializer("module", device="cpu").load_into_module(module)
    return module


wide, half, more = load(Module(4)), load(Module().half()), Module(more=True)
before = more.more.weight.clone()
load(more)
seen = {
    "shape": (tuple(wide.a.weight.shape), wide.a.in_features),
    "type": half.a.weight.dtype,
    "not in the file": torch.equal(more.more.weight, before),
    "tied": more.a.weight is more.b.weight,
    "cache": more.cache.item(),
    "ids": TensorDeserializer("numbers", device="cpu", dtype=torch.float16)["ids"].item(),
}
print("tensorizer", version("tensorizer"), seen)
raise SystemExit(list(seen.values()) != [((2, 3), 4), torch.float32, True, False, 7.0, 2048.0])
PYTHON
