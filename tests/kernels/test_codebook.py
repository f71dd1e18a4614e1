"""Codebooks against the naive algorithm, the spec's worked examples and their error bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvserve.kernels.score.codebook import Cover, build, directions, extend, match, scales

E1_DEGREES = [0, 5, 10, 19, 20, 28, 60]


def on_circle(degrees: Sequence[float], lengths: Sequence[float] | None = None) -> Tensor:
    """2-D vectors of one stream: [1, N, 2]."""
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    length = torch.ones(len(degrees)) if lengths is None else torch.tensor(lengths)
    return (torch.stack([angles.cos(), angles.sin()], dim=-1) * length[:, None])[None].float()


def build_all(x: Tensor, theta: float) -> Cover:
    """Every vector exists; one theta for all streams."""
    return build(x, torch.ones(x.shape[:2], dtype=torch.bool), torch.full(x.shape[:1], theta))


def of_stream(cover: Cover, stream: int = 0) -> tuple[list[int], list[int]]:
    """References and centres as lists."""
    return cover.ref[stream].tolist(), cover.centres[stream, : cover.counts[stream]].tolist()


def clustered(streams: int, length: int, dim: int, seed: int, spread: float = 0.25) -> Tensor:
    """Random vectors around few directions, some of them twice, of all lengths; one is zero."""
    generator = torch.Generator().manual_seed(seed)
    around = torch.randn(streams, 6, dim, generator=generator)
    which = torch.randint(0, 6, (streams, length), generator=generator)
    x = around.gather(1, which[..., None].expand(-1, -1, dim))
    x = x + spread * torch.randn(streams, length, dim, generator=generator)
    x = x * torch.rand(streams, length, 1, generator=generator).mul(4).exp()
    x[:, length // 2] = x[:, 0]
    x[:, length // 3] = 0
    return x


def reconstruct(entries: Tensor, ref: Tensor, scale: Tensor) -> Tensor:
    """Entries [S, M, D] at the lengths they stand for: [S, N, D]. ref, scale: [S, N]."""
    at = ref[..., None].expand(*ref.shape, entries.shape[-1])
    return entries.gather(1, at) * scale[..., None]


def naive_cover(similar: Tensor) -> tuple[list[int], list[int]]:
    """The printed algorithm with its corrections, degrees summed anew every round."""
    graph, count = similar.clone(), len(similar)
    ref, centres = [-1] * count, list[int]()
    while graph.any():
        degrees = graph.sum(dim=1).tolist()
        node = degrees.index(max(degrees))
        for member in graph[node].nonzero()[:, 0].tolist():
            ref[member] = len(centres)
            graph[member], graph[:, member] = False, False
        centres.append(node)
    return ref, centres


def test_the_first_worked_example() -> None:
    x = on_circle(E1_DEGREES, [1, 2, 3, 4, 5, 6, 7])
    assert of_stream(build_all(x, 0.98)) == ([0, 0, 0, 0, 0, 1, 2], [2, 5, 6])
    cover = build_all(x, 0.95)
    assert of_stream(cover) == ([0, 0, 0, 0, 0, 0, 1], [2, 6])
    entries = x[:, cover.centres[0, :2]]
    rebuilt = reconstruct(entries, cover.ref, scales(x, entries[:, cover.ref[0]]))
    error = (rebuilt - x).norm(dim=-1) / x.norm(dim=-1)
    assert error.max().item() == pytest.approx(0.3129, abs=5e-5)
    assert error.max() < math.sqrt(2 * (1 - 0.95))


def test_its_fifth_vector_is_rebuilt_from_the_first_entry_not_the_nearest() -> None:
    x = on_circle(E1_DEGREES, [1, 2, 3, 4, 5, 6, 7])
    cover = build_all(x, 0.98)
    unit, lengths = directions(x[:, cover.centres[0, :3]])
    rebuilt = reconstruct(unit, cover.ref, directions(x)[1][..., 0])
    assert rebuilt[0, 4].tolist() == pytest.approx([4.924, 0.868], abs=5e-4)
    assert lengths.shape == (1, 3, 1)


def test_decoded_vectors_match_or_begin_an_entry() -> None:
    x = on_circle(E1_DEGREES)
    entries = x[:, build_all(x, 0.98).centres[0, :3]]
    known, theta = torch.ones(1, 3, dtype=torch.bool), torch.tensor([0.98])
    new = on_circle([12, 25, 40])
    assert match(new, entries, known, theta).tolist() == [[0, 1, -1]]
    cover = extend(
        new, torch.ones(1, 3, dtype=torch.bool), entries, known, theta, torch.tensor([3])
    )
    assert of_stream(cover) == ([0, 1, 3], [2])


@pytest.mark.parametrize("theta", [0.3, 0.8, 0.95, 0.999])
def test_a_cover_is_the_naive_one_and_keeps_its_bound(theta: float) -> None:
    x = clustered(5, 40, 8, seed=1)
    cover = build_all(x, theta)
    unit, lengths = directions(x)
    similar = unit @ unit.transpose(1, 2) > theta
    similar.diagonal(dim1=1, dim2=2).fill_(True)
    for stream in range(len(x)):
        ref, centres = of_stream(cover, stream)
        assert (ref, centres) == naive_cover(similar[stream])
        entries, numbers = x[stream, centres][None], cover.ref[stream]
        rebuilt = reconstruct(entries, numbers[None], scales(x[stream], entries[0, numbers])[None])[
            0
        ]
        assert (rebuilt[centres] == x[stream, centres]).all(), "an entry is not its own vector"
        error = (rebuilt - x[stream]).norm(dim=-1)
        assert (error <= math.sqrt(2 * (1 - theta)) * lengths[stream, :, 0] * (1 + 1e-6)).all()


def test_what_is_not_there_takes_no_part() -> None:
    x = clustered(3, 30, 8, seed=5)
    there = torch.arange(30) >= torch.tensor([[0], [7], [30]])
    cover = build(x, there, torch.full((3,), 0.9))
    alone = build_all(x[1:2, 7:], 0.9)
    assert cover.ref[1, :7].tolist() == [-1] * 7
    assert cover.ref[1, 7:].tolist() == of_stream(alone)[0]
    assert [at - 7 for at in of_stream(cover, 1)[1]] == of_stream(alone)[1]
    assert cover.counts[2] == 0 and (cover.ref[2] == -1).all()


@pytest.mark.parametrize("tile", [5, 2048])
def test_extending_leaves_what_there_is_alone(tile: int) -> None:
    old, new = clustered(4, 30, 8, seed=6), clustered(4, 12, 8, seed=6, spread=0.4)
    theta = torch.tensor([0.8, 0.9, 0.95, 0.98])
    everything = torch.ones(4, 30, dtype=torch.bool)
    first = build(old, everything, theta)
    entries = old.gather(1, first.centres[..., None].expand(-1, -1, 8))
    known = torch.arange(30) < first.counts[:, None]
    there = torch.ones(4, 12, dtype=torch.bool)
    more = extend(new, there, entries, known, theta, first.counts, tile)
    assert (more.counts > 1).all() and (more.counts < 12).any()
    for stream, count in enumerate(first.counts.tolist()):
        whole = torch.cat([entries[stream, :count], new[stream, more.centres[stream]]])
        unit, refs = directions(whole)[0], more.ref[stream]
        assert refs.max() < count + more.counts[stream]
        cosine = (unit[refs] * directions(new[stream])[0]).sum(dim=-1)
        itself = (whole[refs] == new[stream]).all(dim=-1)
        assert ((cosine > theta[stream]) | itself).all()
        among = unit[: count + more.counts[stream]]
        assert ((among @ among.T).fill_diagonal_(-1) <= theta[stream]).all()
