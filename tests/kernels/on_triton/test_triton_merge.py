"""The mean over a context's parts: by the last program to arrive, or by a launch of its own.

The interpreter runs programs one after the other, so nothing here shows that a GPU orders stores
and loads of programs that run at once. ``test_triton_compile.py`` looks for what orders them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.kernels.attention import arrivals as counters
from kvserve.kernels.attention.arrivals import arrivals
from kvserve.kernels.attention.paged_attention_triton import paged_attention_triton
from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.entry_format import FORMATS
from kvserve.kernels.query_segments import QuerySegments
from kvserve.kernels.shares import Shares
from tests.kernels.coded_case import coded_case
from tests.kernels.on_triton.test_triton_paged_attention import TOLERANCE, Case
from tests.kernels.on_triton.test_triton_quantized import Rows
from tests.kernels.on_triton.test_triton_windows import windowed
from tests.kernels.test_remainder import random_remainder

Inputs = tuple[Any, dict[str, Any]]
"""What attention takes, without and with names."""


@pytest.fixture(autouse=True)
def unwritten(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no program has written is nan."""
    empty = torch.Tensor.new_empty

    def poisoned(x: Tensor, *shape: Any, **options: Any) -> Tensor:
        made = empty(x, *shape, **options)
        return torch.full_like(made, torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def plain(*sizes: Any, chunks: list[int] | None = None) -> Inputs:
    lengths = [150, 0, 3, 65] if chunks is None else [150, 21]
    return Case(*(*sizes, lengths, chunks)).inputs, {}


def with_everything(tables: int, chunks: list[int] | None = None) -> Inputs:
    """Shares, a remainder, sinks and capped logits."""
    heads = 2 // tables
    case = Case(tables, heads, 3, 32, 16, torch.float32, [150, 40], chunks)
    left = random_remainder(len(case.tables), 2, 32, torch.float32, 1)
    recent = torch.full((len(case.q),), 4)
    more = {"remainder": left, "sinks": torch.randn(6), "soft_cap": 1.5}
    return case.inputs, {"shares": Shares(torch.empty(case.q.shape[:2]), recent), **more}


def in_a_window() -> Inputs:
    case = Case(1, 2, 4, 64, 16, torch.float16, [150, 2, 3, 65])
    q, keys, values, tables, _, scale = case.inputs
    return (q, keys, values, tables, windowed(case, 20), scale), {"sinks": torch.randn(8)}


def of_codes() -> Inputs:
    case = coded_case([[37, 40], [30, 9]], [[32, 12], [0, 4]], [1, 1])
    chunks = QuerySegments(case.rows, case.last, int(case.last.max()) + 1)
    return (case.q, case.keys, case.values, case.tables, chunks, 0.3), {"codes": case.codes}


def of_levels(form: str) -> Inputs:
    return Rows(FORMATS[form], 1, 2, torch.float32).arguments([1, 1]), {}


CASES: dict[str, Callable[[], Inputs]] = {
    "float16": partial(plain, 1, 2, 4, 64, 16, torch.float16),
    "seven queries": partial(plain, 2, 1, 7, 128, 32, torch.float32),
    "one query": partial(plain, 1, 2, 1, 32, 5, torch.float32),
    "chunks": partial(plain, 1, 1, 2, 32, 16, torch.float32, chunks=[3, 7]),
    "everything": partial(with_everything, 1),
    "everything, heads apart": partial(with_everything, 2),
    "everything, chunks": partial(with_everything, 1, [3, 1]),
    "window": in_a_window,
    "codes": of_codes,
    "int8": partial(of_levels, "int8"),
    "k8v4": partial(of_levels, "k8v4"),
}


def results(given: Inputs, num_splits: int, merges: bool) -> list[Tensor]:
    """The means, and shares if asked for."""
    inputs, more = given
    how: dict[str, Any] = more | {"num_splits": num_splits, "merges": merges}
    out = paged_attention_triton(*inputs, **how)
    return [out, more["shares"].out.clone()] if "shares" in more else [out]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit in the interpreter; a GPU adds up in another order."""
    within = 0.0 if found[0].device.type == "cpu" else TOLERANCE[found[0].dtype]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=within, rtol=within)


@pytest.mark.parametrize("num_splits", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_both_forms_are_equal(case: str, num_splits: int) -> None:
    """And the counters are zero again, so that a second launch gives the same."""
    given = CASES[case]()
    expected = results(given, num_splits, merges=False)
    assert all(torch.isfinite(each).all() for each in expected)
    for _ in range(2):
        assert_equal(results(given, num_splits, merges=True), expected)
        assert not arrivals(1, expected[0].device).any()


def test_many_parts() -> None:
    """More than are read at once: sums of the separate launch are then in another order."""
    given = plain(1, 2, 4, 64, 16, torch.float32)
    found, expected = (results(given, 19, merges) for merges in (True, False))
    torch.testing.assert_close(found[0], expected[0], atol=1e-6, rtol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has an order of its own")
@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 3, 0, 2]])
def test_whoever_is_last_gives_the_same(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    given = with_everything(1)
    expected = results(given, 4, merges=True)
    place = InterpreterBuilder.set_grid_idx
    turns: list[int] = []

    def reordered(self: Any, x: int, y: int, z: int) -> None:
        turns.append(order[z])
        place(self, x, y, order[z])

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", reordered)
    found = results(given, 4, merges=True)
    assert turns[:4] == order
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter tells what is read")
def test_what_is_not_written_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 3 entries has one part, and one of none has none: the others are nan."""
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load
    reads: list[bool] = []

    def watched(self: Any, pointers: Any, mask: Any, *how: Any) -> Any:
        loaded = load(self, pointers, mask, *how)
        if loaded.data.dtype == "float32":  # parts and sums, beside a cache of float16
            reads.append(not (loaded.data[mask.data] != loaded.data[mask.data]).any())
        return loaded

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)
    results(plain(1, 2, 4, 64, 16, torch.float16), 4, merges=True)
    assert len(reads) > 100 and all(reads)


@pytest.mark.parametrize(("group", "launches"), [(16, ["attend"]), (20, ["attend", "merge"])])
def test_a_program_merges_few_queries(
    group: int, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(Kernel, "launch", lambda kernel, *_, **__: names.append(name_of(kernel)))
    results(plain(1, 1, group, 16, 16, torch.float32), 3, merges=True)
    assert names == launches


def name_of(kernel: Kernel) -> str:
    return kernel.source.__name__


def test_counters_stay_where_they_are() -> None:
    """Graphs hold their address: more lanes get counters of their own."""
    device = torch.zeros(1).device
    few = arrivals(8, device)
    many = arrivals(len(few) + 1, device)
    assert len(many) == 2 * len(few) and few.data_ptr() != many.data_ptr()
    assert arrivals(len(few), device) is few and arrivals(len(many), device) is many
    assert few.dtype is torch.int32 and not few.any() and not many.any()


def test_counters_are_not_made_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before its graph is captured"):
        counters._counters(1 << 20, torch.device("cuda"))
