#!/bin/sh
# tinygrad 0.14.0, on its Python device, which needs no compiler: NaN, inf and indices that are not there
# Guess: as in numpy and torch: inf * 0 and inf - inf are NaN; max and sort keep a NaN; logsumexp of -inf alone is -inf; an index beyond the end is an error
# Seen: x * 0 and x - x are 0, since they are folded before anything is computed, so `x * 0` hides what went wrong in x; max drops a NaN unless it is first, relu makes 0 of it, sort of 3, 1, NaN, 2 is 1, 2, 2, 3; logsumexp of -inf alone is NaN; x[5] of three numbers is 0, and so is x[-4], by an index tensor
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q tinygrad==0.14.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import os

os.environ["DEV"] = "PYTHON"
from importlib.metadata import version

from tinygrad import Tensor

nan, inf = float("nan"), float("inf")
x = Tensor([inf, nan, 2.0]).realize()
numbers = Tensor([1.0, 2.0, 3.0])
seen = {
    "x * 0": (x * 0).tolist(),
    "x - x": (x - x).tolist(),
    "x times a computed 0": (x * Tensor([0.0, 0.0, 0.0])).tolist(),
    "max of 1, NaN, 3": Tensor([1.0, nan, 3.0]).max().item(),
    "max of NaN, 1, 3": Tensor([nan, 1.0, 3.0]).max().item(),
    "relu": Tensor([nan]).relu().tolist(),
    "sort": Tensor([3.0, 1.0, nan, 2.0]).sort()[0].tolist(),
    "logsumexp": Tensor([-inf, -inf]).logsumexp().item(),
    "indices 5, -1, -4 of three": numbers[Tensor([5, -1, -4])].tolist(),
}
print("tinygrad", version("tinygrad"), seen)
wanted = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [nan, nan, 0.0], 3.0, nan, [0.0], [1.0, 2.0, 2.0, 3.0], nan, [0.0, 3.0, 0.0]]
raise SystemExit(str(list(seen.values())) != str(wanted))
PYTHON
