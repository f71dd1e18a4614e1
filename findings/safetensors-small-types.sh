#!/bin/sh
# safetensors 0.8.0 with torch 2.13.0: the types of MX checkpoints, F4 and F8_E8M0, in a file and as bytes
# Guess: what save writes, load and load_file read
# Seen: save writes both, with twice the last dimension for F4; load (of bytes) knows neither; load_file reads both, and halves F4's dimension again; a slice of F4 is an error in any form
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 safetensors==0.8.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import struct
from importlib.metadata import version

import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file

seen = {}
for kind in (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu):
    tensors = {"a": torch.arange(24, dtype=torch.uint8).view(4, 6).view(kind)}
    written = save(tensors)
    (length,) = struct.unpack("<Q", written[:8])
    header = json.loads(written[8 : 8 + length])["a"]
    save_file(tensors, "a.safetensors")
    found = [header["dtype"], header["shape"]]
    ways = {
        "load": lambda: load(written)["a"],
        "load_file": lambda: load_file("a.safetensors")["a"],
        "get_slice": lambda: safe_open("a.safetensors", "pt").get_slice("a")[:2],
    }
    for name, read in ways.items():
        try:
            found.append(list(read().shape))
        except (KeyError, RuntimeError) as error:
            found.append(f"{name}: {type(error).__name__} {error}"[:70])
    seen[kind] = found
    print(version("safetensors"), kind, found)
wanted = [["F4", [4, 12], None, [4, 6], None], ["F8_E8M0", [4, 6], None, [4, 6], [2, 6]]]
raise SystemExit([[None if ": " in each else each for each in found] for found in seen.values()] != wanted)
PYTHON
