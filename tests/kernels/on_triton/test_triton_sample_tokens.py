"""Fused sampling by Triton against the torch reference.

Whether a token is kept, and whether it wins, hangs on float32 sums and logarithms, which the two
round differently. Filters therefore stand away from every probability; draws that are as good as
undecided are none of the cases, which ``undecided`` asserts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.kernels.sample import cut_offs as cutting
from kvserve.kernels.sample import sample_tokens_triton as kernel
from kvserve.kernels.sample.cut_offs import cut_offs
from kvserve.kernels.sample.sample_tokens import gumbel_noise, keep_allowed, sample_tokens_torch
from kvserve.kernels.sample.sample_tokens_triton import sample_tokens_triton

pytestmark = pytest.mark.usefixtures("device")

# temperature, top_p, top_k, min_p
GREEDY, PLAIN = (0.0, 1.0, 0.0, 0.0), (0.8, 1.0, 0.0, 0.0)
FILTERS = [
    (1.0, 1.0, 1.0, 0.0),
    (0.7, 1.0, 20.0, 0.0),
    (1.0, 1.0, 130.0, 0.0),  # more than the lanes of a tile
    (1.0, 1.0, 100_000.0, 0.0),  # more than there are tokens
    (1.0, 0.9, 0.0, 0.0),
    (1.0, 1e-6, 0.0, 0.0),
    (3.0, 0.97, 0.0, 0.0),
    (1.0, 1.0, 0.0, 0.05),
    (1.0, 1.0, 0.0, 1.0),
    (1.3, 0.8, 30.0, 0.0),
    (1.0, 0.95, 40.0, 0.1),
    (1.0, 0.5, 0.0, 0.001),
    (1e-5, 0.9, 50.0, 0.0),
    (50.0, 0.9, 70.0, 0.01),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of them over a small vocabulary. Rows are cut into parts to find cut-offs, and are
    one program's to draw, where they are many."""
    monkeypatch.setattr(cutting, "_TILE", 64)
    monkeypatch.setattr(cutting, "_FEW", 32)
    monkeypatch.setattr(cutting, "_SPAN", 1)
    monkeypatch.setattr(kernel, "_DRAW_TILE", 32)
    monkeypatch.setattr(cutting, "num_processors", lambda device: 200)
    monkeypatch.setattr(kernel, "num_processors", lambda device: 1)


def rows_of(*settings: tuple[float, float, float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """Settings, seeds (all 64 bits of them) and positions."""
    count = len(settings)
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,))
    return torch.tensor(settings), seeds, torch.randint(0, 2**17, (count,))


def scores(logits: Tensor, settings: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """What the reference takes the largest of: logits alone where a row is greedy."""
    temperature, top_p, top_k, min_p = settings.unbind(dim=1)
    scaled = logits / temperature.clamp(min=1e-30)[:, None]
    drawn = keep_allowed(scaled, top_p, top_k, min_p)
    drawn = drawn + gumbel_noise(seeds, positions, logits.shape[1])
    return torch.where(temperature[:, None] > 0, drawn, logits)


def assert_same_tokens(logits: Tensor, rows: tuple[Tensor, Tensor, Tensor], filtered: bool) -> None:
    expected = sample_tokens_torch(logits, *rows, filtered)
    padded = torch.nn.functional.pad(scores(logits, *rows), (0, 1), value=-torch.inf)
    first, second = padded.topk(2, dim=-1).values.unbind(-1)
    undecided = (first - second < 1e-5) & (first > second) & (rows[0][:, 0] > 0)
    assert not undecided.any(), "choose another random seed"
    assert torch.equal(sample_tokens_triton(logits, *rows, filtered), expected)


def kept_by_kernel(logits: Tensor, settings: Tensor) -> Tensor:
    """The tokens above the cut-offs, which are (value, id) as one number."""
    x = logits / settings[:, :1]
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 31
    order += 0x7FFFFFFF - torch.arange(x.shape[1])
    return (order >= cut_offs(logits, settings)[:, None]) & (x > -torch.inf)


def assert_same_kept(logits: Tensor, settings: Tensor) -> None:
    temperature, top_p, top_k, min_p = settings.unbind(dim=1)
    expected = keep_allowed(logits / temperature[:, None], top_p, top_k, min_p) > -torch.inf
    found = kept_by_kernel(logits, settings)
    assert torch.equal(found.sum(-1), expected.sum(-1))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "vocab", [1, 64, *(pytest.param(n, marks=pytest.mark.slow) for n in (33, 203))]
)
def test_tokens(vocab: int) -> None:
    """Greedy, drawn and filtered rows in one launch; no whole tiles; logits in strided rows."""
    settings = [GREEDY, PLAIN, *FILTERS, PLAIN, GREEDY]
    logits = torch.randn(len(settings), vocab + 3)[:, :vocab] * 3
    assert_same_tokens(logits, rows_of(*settings), filtered=True)


@pytest.mark.parametrize("settings", [[GREEDY] * 3, [PLAIN, GREEDY, (1e-5, 1.0, 0.0, 0.0), PLAIN]])
def test_tokens_without_filters(settings: list[tuple[float, float, float, float]]) -> None:
    logits = torch.randn(len(settings), 150)
    assert_same_tokens(logits, rows_of(*settings), filtered=False)


@pytest.mark.parametrize(
    "spread", [1.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.01, 8.0))]
)
def test_what_filters_keep(spread: float) -> None:
    """From flat logits, of which a filter keeps most, to peaked ones."""
    logits = torch.randn(len(FILTERS), 300) * spread
    assert_same_kept(logits, torch.tensor(FILTERS))


def test_parts_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many a row is cut into depends on the other rows. Neither a cut-off nor a sum does, which
    would seldom move one."""
    filters = FILTERS[1::3]  # by number, by mass, by both and the best one's weight, and flat ones
    settings, logits = torch.tensor(filters), torch.randn(len(filters), 300) * 2
    cuts, sums, parts = list[Tensor](), list[Tensor](), list[int]()
    launch = cutting._narrow.launch

    def noted(grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        _, counts, _, totals, *_ = args
        parts.append(counts.shape[1])
        sums.append(totals)
        launch(grid, *args, **options)

    monkeypatch.setattr(cutting._narrow, "launch", noted)
    for processors in (1, 3 * len(filters), 5 * len(filters)):
        monkeypatch.setattr(cutting, "num_processors", lambda device, n=processors: n)
        cuts.append(cut_offs(logits, settings))
    assert parts == [1, 3, 5]
    assert all(torch.equal(found[0], each) for found in (cuts, sums) for each in found)


@pytest.mark.slow
def test_equal_logits_are_kept_by_id() -> None:
    """Limits that fall among equals, zeros of both signs among them."""
    logits = torch.randint(-2, 3, (6, 200)).float()
    logits *= torch.where(torch.rand(logits.shape) < 0.5, 1.0, -1.0)
    assert (logits == 0).any() and (1 / logits == -torch.inf).any()
    settings = torch.tensor(
        [
            (1.0, 1.0, 5.0, 0.0),
            (1.0, 1.0, 90.0, 0.0),
            (1.0, 0.301, 0.0, 0.0),
            (2.0, 0.703, 120.0, 0.0),
            (1.0, 0.901, 0.0, 0.3),
            (1.0, 1.0, 7.0, 1.0),
        ]
    )
    assert_same_kept(logits, settings)
    assert_same_kept(torch.zeros_like(logits[:3]), settings[:3])
    assert_same_tokens(logits, rows_of(*[GREEDY] * 6), filtered=False)


def test_banned_tokens_never_come_back() -> None:
    logits = torch.randn(5, 100)
    logits[:, torch.randperm(100)[:90]] = -torch.inf
    filters = [PLAIN, (1.0, 1.0, 20.0, 0.0), (1.0, 0.999, 0.0, 0.0), (50.0, 1.0, 0.0, 0.01), GREEDY]
    rows = rows_of(*filters)
    assert_same_kept(logits[:4], rows[0][:4])
    assert_same_tokens(logits, rows, filtered=True)
    nothing = torch.full((5, 100), -torch.inf)
    assert not sample_tokens_triton(nothing, *rows, True).any()


def test_a_row_draws_the_same_in_any_batch() -> None:
    filters = FILTERS[4::5]
    rows, logits = rows_of(*filters, PLAIN), torch.randn(len(filters) + 1, 203)
    together = sample_tokens_triton(logits, *rows, True)
    for i in range(len(filters) + 1):
        own, seed, position = (x[i : i + 1] for x in rows)
        alone = sample_tokens_triton(logits[i : i + 1], own, seed, position, i < len(filters))
        assert alone == together[i]
