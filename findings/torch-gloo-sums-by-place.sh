#!/bin/sh
# torch 2.13.0, gloo: all_reduce of a tensor that has one number everywhere on each of three ranks
# Guess: the sum is one number everywhere, too
# Seen: 256 + 1 + 1 in bfloat16 is 256 in one part of the tensor and 258 in another, 1e7 - 1e7 + 0.1 in float32 is 0 and 0.1; all ranks have the same, and between two ranks there is one sum
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
cat > sums.py <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUMBERS = {torch.bfloat16: [256.0, 1.0, 1.0], torch.float32: [0.1, 1e7, -1e7]}


def rank(own, size, store, found):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=own, world_size=size)
    for dtype, numbers in NUMBERS.items():
        x = torch.full((3000,), numbers[own], dtype=dtype)
        dist.all_reduce(x)
        every = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(every, x)
        if own == 0:
            alike = all(torch.equal(one, x) for one in every)
            found[size, str(dtype)] = alike, [round(n, 3) for n in x.unique().tolist()]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with mp.Manager() as manager:
        found = manager.dict()
        for size in (2, 3):
            mp.spawn(rank, (size, f"{sys.argv[1]}/store{size}", found), size)
        seen = dict(found)
    print(torch.__version__, seen)
    wanted = {
        (2, "torch.bfloat16"): (True, [256.0]),
        (2, "torch.float32"): (True, [1e7]),
        (3, "torch.bfloat16"): (True, [256.0, 258.0]),
        (3, "torch.float32"): (True, [0.0, 0.1]),
    }
    raise SystemExit(seen != wanted)
PYTHON
"$work/venv/bin/python" sums.py "$work"
