#!/bin/sh
# torch 2.13.0, torch.compile on a CPU (needs g++): x.to(bfloat16).to(float32)
# Guess: a cast rounds, compiled or not: the part of a number that bfloat16 does not hold, x - x.to(bfloat16).float(), is small and not 0
# Seen: compiled, two casts that follow each other are taken out: the part left over is 0, and 70000 passes through float16 as 70000 (inf in eager mode); a cast to float8_e4m3fn and back stays. So an error of rounding measured in a compiled function is 0, and a number split in two bfloat16 loses its lower half. `torch._inductor.config.emulate_precision_casts = True` keeps the casts; its comment in torch/_inductor/config.py says so of operators that are fused, and casts that one writes oneself are such, too
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
cat > casts.py <<'PYTHON'
import os

os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
import torch
import torch._inductor.config


def lost(x):
    return x - x.to(torch.bfloat16).to(torch.float32)


def half(x):
    return x.to(torch.float16).to(torch.float32)


def eight(x):
    return x.to(torch.float8_e4m3fn).to(torch.float32)


def seen():
    torch.compiler.reset()
    found = []
    for function, number in ((lost, 3.14159), (half, 70000.0), (eight, 3.14159)):
        x = torch.full((32,), number)
        found += [function(x)[0].item(), torch.compile(function)(x)[0].item()]
    return [round(number, 6) for number in found]


plain = seen()
torch._inductor.config.emulate_precision_casts = True
kept = seen()
print(torch.__version__, "eager and compiled: lost in bfloat16, 70000 in float16, pi in e4m3fn:", plain, "| with emulate_precision_casts:", kept)
inf = float("inf")
raise SystemExit(plain != [0.000965, 0.0, inf, 70000.0, 3.25, 3.25] or kept != [0.000965, 0.000965, inf, inf, 3.25, 3.25])
PYTHON
"$work/venv/bin/python" casts.py
