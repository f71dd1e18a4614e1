#!/bin/sh
# torch 2.13.0, on a CPU: the first numbers of one seed in tensors of several sizes
# Guess: randn(8) is the start of randn(32), as rand(8) is of rand(32)
# Seen: it is not: below 16 numbers each is drawn by itself in float64, from 16 on in blocks of 16, the second half of a block made with the first. Two sizes of 16 and more agree in whole blocks, unless the size is no multiple of 16: then the last 16 numbers are drawn anew, so randn(17) and randn(16) share the first number alone. The transpose of a (4, 8) tensor is filled one by one, too. So noise, or a random matrix, of one seed depends on the size; rand and exponential_ do not
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch

generator = torch.Generator()


def drawn(fill, *shape):
    return fill(torch.empty(*shape), generator.manual_seed(1))


def normal(x, source):
    return x.normal_(generator=source)


def same(one, other):
    return [bool(a) for a in torch.isclose(one, other, atol=1e-4)]


few, sixteen, more, many = (drawn(normal, size) for size in (15, 16, 17, 32))
turned = normal(torch.empty(4, 8).t(), generator.manual_seed(1)).t().flatten()
seen = {
    "15 and 32": sum(same(few, many[:15])),
    "16 and 32": sum(same(sixteen, many[:16])),
    "16 and 17": sum(same(sixteen, more[:16])),
    "(4, 8) turned and 15": sum(same(turned[:15], few)),
    "rand, 15 and 32": sum(same(drawn(lambda x, g: x.uniform_(generator=g), 15), drawn(lambda x, g: x.uniform_(generator=g), 32)[:15])),
    "exponential, 15 and 32": sum(same(drawn(lambda x, g: x.exponential_(generator=g), 15), drawn(lambda x, g: x.exponential_(generator=g), 32)[:15])),
}
print(torch.__version__, "numbers alike at the start:", seen)
raise SystemExit(list(seen.values()) != [0, 16, 1, 15, 15, 15])
PYTHON
