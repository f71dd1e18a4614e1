"""Paged attention: the torch reference against plain softmax, each kernel against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.entry_format import FORMATS, EntryFormat, few
from kvserve.kernels.attend import paged_attention_triton as launcher
from kvserve.kernels.attend.paged_attention import Newest, paged_attention_torch
from kvserve.kernels.attend.paged_attention_cpu import paged_attention_cpu
from kvserve.kernels.attend.query_segments import QuerySegments, Shares
from kvserve.kernels.dispatch import UNALIGNED, Kernel
from kvserve.kernels.store.quantized_entries import QuantizedBlocks
from tests.kernels.paged_case import (
    EACH_KERNEL,
    KERNELS,
    SCALE,
    TRITON,
    LevelRows,
    NewestCase,
    Shape,
    assert_same,
    by_triton,
    make,
    random_remainder,
    windowed,
)
from tests.thinning import thinned

pytestmark = pytest.mark.usefixtures("unwritten")
BOTH = [torch.float32, torch.bfloat16]


def test_reference_against_plain_softmax() -> None:
    case = make(Shape(heads=12, kv_heads=4, block=4, tables=2), [9, 0, 6], [3, 1, 6])
    out, owner = paged_attention_torch(*case.inputs()), case.starts.diff()
    for t, row in enumerate(case.rows.repeat_interleave(owner)):
        for h in range(12):
            r, kv_head = divmod(h // 3, 2)
            place = torch.arange(int(case.last[0, r, t]) + 1)
            at = case.tables[0, row, r, place // 4].long(), place % 4, kv_head
            probs = torch.softmax(case.keys[at] @ case.query[t, h] * SCALE, dim=0)
            torch.testing.assert_close(out[t, h], probs @ case.values[at])


# ---- rows of numbers ----------------------------------------------------------------------------

HALF = torch.float16
SHAPES = [
    (Shape(heads=8, dim=64, block=16, layers=2), HALF),
    (Shape(heads=14, dim=128, block=32, tables=2), torch.float32),
    (Shape(heads=2, dim=32, block=5, columns=30), torch.float32),
    (Shape(heads=20, kv_heads=1, block=256, columns=1), HALF),
    pytest.param(
        Shape(heads=32, kv_heads=8, dim=128, block=64, tables=8),
        torch.bfloat16,
        marks=pytest.mark.gpu,
    ),
]
ROWS = {
    # Ragged rows; an empty one and one shorter than its share of the splits among them.
    "decode": ([150, 0, 3, 65], [1, 1, 1, 1]),
    # A chunk of several query tiles, one of a single token, an empty one, one without context.
    "chunks": ([90, 41, 50, 21], [23, 1, 0, 21]),
    "few": ([70, 21], [3, 7]),
}
_DIMS = 8, 16, 24, 64, 80, 128, 256, 264, 320, 512
# A chunk of several tiles of 32 rows of queries, and what a compiled kernel alone is asked for.
COMPILED = [
    *((Shape(dim=n, layers=2), [1, 17, 96], [1, 1, 5]) for n in _DIMS),
    *(
        (Shape(heads=heads, kv_heads=kv_heads), [3, 65, 64], [1, 2, 40])
        for heads, kv_heads in ((1, 1), (4, 4), (6, 2), (7, 1), (40, 1), (12, 3))
    ),
    *(
        (Shape(block=size, columns=-(-200 // size)), [200, 129, 1], [1, 33, 1])
        for size in (1, 6, 16, 64, 100)
    ),
    *((Shape(heads=8, tables=n), [90, 1, 66, 70], [1, 1, 66, 7]) for n in (1, 2)),
    (Shape(), [9, 0, 2], [1, 1, 5]),  # tokens that see nothing
]


@pytest.mark.parametrize(
    ("kernel", "rows"),
    [
        *((kernel, "decode") for kernel in (*TRITON, "triton-in-19")),
        *(("triton", "chunks"), ("triton-split", "few")),
    ],
)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_shapes(kernel: str, rows: str, shape: Shape, dtype: torch.dtype) -> None:
    assert_same(kernel, make(shape, *ROWS[rows], dtype).inputs())


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("shape", "held", "lengths"), COMPILED)
def test_compiled_shapes(
    shape: Shape, held: list[int], lengths: list[int], dtype: torch.dtype
) -> None:
    case = make(shape, held, lengths, dtype)
    case.query.mul_(min(1.0, 16 / shape.dim**0.5))  # logits as of heads of 256
    assert_same("cpu", case.inputs())


@EACH_KERNEL
def test_limits_of_a_chunk_need_not_ascend(kernel: str) -> None:
    """An observation pass asks for any subset of tokens, in any order."""
    case = make(Shape(dim=32, block=16), [96, 40], [40, 3])
    shuffled = case.last[..., torch.randperm(43)].clamp(max=36)
    shuffled[..., 40:] = torch.tensor([3, 39, 0]).clamp(max=int(case.last[0, 0, -1]))
    assert_same(kernel, replace(case, last=shuffled).inputs())


@pytest.mark.compiler
@pytest.mark.parametrize("tables", [1, 2])
def test_a_long_context_is_the_same_on_any_number_of_threads(
    tables: int, set_threads: Callable[[int], None]
) -> None:
    shape = Shape(block=16, columns=200, tables=tables)
    inputs = make(shape, [3200, 2048, 2049, 5], [1, 1, 40, 1]).inputs()
    set_threads(1)
    alone = assert_same("cpu", inputs)
    set_threads(3)
    assert torch.equal(paged_attention_cpu(*inputs), alone)


@EACH_KERNEL
def test_large_logits_do_not_overflow(kernel: str) -> None:
    case = make(Shape(), [90, 12], [1, 5])
    assert_same(kernel, replace(case, query=(case.query * 200).clone()).inputs())


@pytest.mark.parametrize("kernel", TRITON)
def test_a_long_row_is_split_beside_short_ones(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 64 entries at least: most rows fill one, and what theirs left behind is not read."""
    monkeypatch.setattr(launcher, "_splits", lambda *_: (4, 64))
    case = make(Shape(dim=32, block=16), [150, 40, 0, 64, 65], [1] * 5)
    assert_same(kernel, case.inputs())


# ---- what is not there --------------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("block", "chunk 1 reads block 1000000, which is not one of the pool"),
        ("freed", "chunk 1 reads block 0,"),
        ("negative", "chunk 1 reads block -5,"),
        ("entry", "chunk 1 sees entry 96, which its tables do not hold"),
        ("row", "chunk 1 is of table row 3, which is not there"),
        ("chunk", "chunk 1 ends at token 7, which is not there"),
    ],
)
def test_what_is_not_there_is_refused(broken: str, message: str) -> None:
    case = make(Shape(), [96, 80], [1, 5])
    names = {"block": 1_000_000, "freed": 0, "negative": -5}
    if broken in names:
        case.tables[0, case.rows[1], 0, 9] = names[broken]
    elif broken == "entry":
        case.last[0, 0, 3] = 96
    elif broken == "row":
        case.rows[1] = 3
    else:
        case.starts[2] = 7
    with pytest.raises(IndexError, match=message):
        paged_attention_cpu(*case.inputs())


def test_blocks_outside_of_the_cache_are_not_seen() -> None:
    case = make(Shape(heads=2, kv_heads=1, block=16, columns=3), [40, 40], [1, 1])
    expected = paged_attention_torch(*case.inputs())
    row = case.rows[0]
    case.tables[0, row, 0, 1:] = torch.tensor([len(case.keys), -1])
    found = by_triton(*case.inputs())
    case.last[0, 0, 0] = 15
    case.tables[0, row, 0, 1:] = 0
    torch.testing.assert_close(found, paged_attention_torch(*case.inputs()))
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.compiler
def test_shapes_it_is_not_built_for_are_refused_by_name() -> None:
    def refused(case: Any, message: str, attend: Any = paged_attention_cpu) -> None:
        with pytest.raises(ValueError, match=message):
            attend(*case.inputs())

    shapes = r"\(query \[1, 4, 12\], blocks \[13, 8, 2, 12\], tables \[2, 1, 12\]\)"
    refused(make(Shape(dim=12), [9], [1]), f"paged attention: head_dim 12 .* {shapes}")
    refused(make(Shape(dim=520), [9], [1]), "head_dim 520")
    refused(make(Shape(dim=24), [9], [1]), r"head_dim is not one of \(16, 32", by_triton)
    refused(make(Shape(), [9], [1], torch.float16), "dtype torch.float16")
    refused(make(Shape(heads=5), [9], [1]), "do not divide")
    fine = make(Shape(), [9], [1])
    refused(replace(fine, keys=fine.keys.mT.contiguous().mT), "not dense")
    refused(replace(fine, values=fine.values.clone()), "not laid out alike")
    refused(replace(fine, values=fine.values.bfloat16()), "have to be the same")
    refused(replace(fine, tables=fine.tables.long()), "tables are not dense int32")
    refused(replace(fine, last=fine.last.int()), "chunks are not dense int64")
    refused(replace(fine, query=torch.cat([fine.query, fine.query])), "chunks do not fit")
    levels = LevelRows(FORMATS["int8"], 16, torch.float32)
    q, k, v, *others = levels.inputs([1, 1, 1])
    rest: Any = others
    with pytest.raises(ValueError, match="keys and values are not both levels"):
        paged_attention_cpu(q, k, v.widened(), *rest)
    fp8, _ = LevelRows(FORMATS["fp8"], 16, torch.float32).blocks.layer(1)
    with pytest.raises(ValueError, match=r"no keys of .* beside values of .*e4m3=True"):
        paged_attention_cpu(q, k, fp8, *rest)
    left = random_remainder(3, 2, 16)
    with pytest.raises(ValueError, match=r"keys of the remainder have to be \[2, 2, 16\]"):
        paged_attention_cpu(*fine.inputs(), remainder=left)


@pytest.mark.usefixtures("untouched_memory")
def test_offsets_exceed_31_bits() -> None:
    """Of tiles in one block; the test of codes reads others, and the compiled kernel."""
    case = make(Shape(dim=32, block=64, columns=1), [20], [1], HALF)
    expected = paged_attention_torch(*case.inputs())
    cache = torch.empty(270_000, 2, 64, 2, 32, dtype=HALF)
    assert cache.numel() > 2**31
    cache[-1] = torch.stack([case.keys, case.values], dim=1)[case.tables[0, 0, 0, 0].long()]
    case.tables[0, 0, 0] = len(cache) - 1
    case = replace(case, keys=cache[:, 0], values=cache[:, 1])
    torch.testing.assert_close(by_triton(*case.inputs()), expected, atol=2e-3, rtol=2e-3)


# ---- windows, sinks, capped logits, remainders --------------------------------------------------

LONG = Shape(heads=8, block=16, columns=200)
SMALL = [
    (Shape(heads=8, dim=64, block=16), HALF, [1, 1, 1, 1]),
    (Shape(heads=6, dim=32, block=64, tables=2), torch.float32, [1, 1, 1, 1]),
    (Shape(dim=32, block=16), torch.float32, [40, 1, 3, 33]),
    (Shape(heads=4, kv_heads=1, dim=32, block=64), torch.float32, [70, 2, 3, 65]),
]


@thinned(
    {
        "kernel": TRITON,
        "shape,dtype,lengths": SMALL,
        "window": [1, 20, 100],
        "always": [0, 1, 4, 40],
    },
    rest=False,
)
def test_windows(
    kernel: str, shape: Shape, dtype: torch.dtype, lengths: list[int], window: int, always: int
) -> None:
    case = windowed(make(shape, [110, 4, 3, 65], lengths, dtype), window, always)
    assert_same(kernel, case.inputs())


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("window", [1, 5, 16, 100, 1024, 5000])
@pytest.mark.parametrize("always", [0, 40])
def test_compiled_windows(window: int, always: int, dtype: torch.dtype) -> None:
    case = make(LONG, [3, 1030, 2500, 64], [1, 1, 70, 64], dtype)
    assert_same("cpu", windowed(case, window, always).inputs())


@thinned({"kernel": TRITON, "window": [30, None], "cap": [0.0, 1.5]})
def test_sinks_and_capped_logits(kernel: str, window: int | None, cap: float) -> None:
    case, left = make(Shape(dim=32, block=16), [110, 0, 3, 65], [40, 1, 3, 33]), None
    if window is None:
        left = random_remainder(len(case.tables[0]), 2, 32)
    else:
        case = windowed(case, window)
    sinks = torch.tensor([0.5, -2.0, 40.0, -300.0])
    how: dict[str, Any] = {"shares": case.shares(2), "remainder": left, "sinks": sinks}
    assert_same(kernel, case.inputs(), **how, soft_cap=cap)


@pytest.mark.compiler
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [7, 1500, None])
def test_compiled_sinks_and_capped_logits(window: int | None, cap: float) -> None:
    case = make(LONG, [3, 1030, 2500, 0], [1, 1, 70, 3])
    if window is not None:
        case = windowed(case, window)
    sinks = torch.tensor([0.0, 1.0, -3.0, 200.0, -200.0, 4.0, 0.5, 2.0])
    assert_same("cpu", case.inputs(), shares=case.shares(1), sinks=sinks, soft_cap=cap)


@pytest.mark.compiler
@pytest.mark.parametrize("window", [40, 1500])
def test_where_a_chunk_begins_to_read_changes_nothing(window: int) -> None:
    """Its first token sees entries that the others do not; in as few, sums are the same."""
    whole = windowed(make(replace(LONG, heads=2), [2500], [4]), window)
    sinks = torch.tensor([0.5, -1.0])
    assert whole.first is not None
    for token in range(4):
        at = slice(token, token + 1)
        last, first = (x[..., at].contiguous() for x in (whole.last, whole.first))
        alone = replace(whole, query=whole.query[at], last=last, first=first)
        alone = replace(alone, starts=torch.tensor([0, 1]))
        found = paged_attention_cpu(*alone.inputs(), sinks=sinks)
        assert torch.equal(found, paged_attention_cpu(*whole.inputs(), sinks=sinks)[at])


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("length", [1, 5, 40])
def test_other_chunks_and_threads_change_no_bit(
    length: int, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """Of entries as computed. How long its own chunk is may change a row's last bits in float32."""
    case = make(replace(LONG, heads=2), [2500, 1030, 77], [length, 7, 1], dtype)
    set_threads(3)
    together = paged_attention_cpu(*case.inputs())
    set_threads(1)
    own = slice(length)
    alone = replace(case, query=case.query[own], last=case.last[..., own].contiguous())
    alone = replace(alone, rows=case.rows[:1], starts=case.starts[:2])
    assert torch.equal(paged_attention_cpu(*alone.inputs()), together[own])


REMAINDERS = [
    (Shape(heads=6, block=16), torch.float32, [70, 1, 40, 0], [1, 1, 1, 1]),
    (Shape(heads=6, block=16, tables=2), HALF, [33, 20], [1, 1]),
    (Shape(heads=6, block=16), torch.float32, [70, 21], [3, 20]),
]
COMPILED_REMAINDERS = [
    (Shape(), [1, 17, 96], [1, 1, 5]),
    (Shape(heads=8, dim=64), [3, 65, 64, 0], [1, 2, 40, 1]),
    (Shape(heads=8, tables=2), [90, 1, 66], [1, 1, 66]),
    (Shape(heads=6, block=64, columns=40), [2500, 1024, 1025], [1, 1, 9]),
]


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype", "held", "lengths"),
    [
        *((kernel, *case) for kernel in TRITON for case in REMAINDERS),
        *(
            pytest.param("cpu", shape, dtype, *rows, marks=pytest.mark.compiler)
            for shape, *rows in COMPILED_REMAINDERS
            for dtype in BOTH
        ),
    ],
)
def test_remainders(
    kernel: str, shape: Shape, dtype: torch.dtype, held: list[int], lengths: list[int]
) -> None:
    """Rows with and without one, tokens that see nothing, contexts in parts, with shares."""
    case = make(shape, held, lengths, dtype)
    inputs, left = case.inputs(), random_remainder(len(case.tables[0]), shape.kv_heads, shape.dim)
    found = assert_same(kernel, inputs, shares=case.shares(), remainder=left)
    attend = KERNELS[kernel]
    without = attend(*inputs)
    assert not torch.allclose(found, without, atol=2e-2)
    nothing = left._replace(bias=torch.full_like(left.bias, -torch.inf))
    same = attend(*inputs, remainder=nothing)
    torch.testing.assert_close(same, without, atol=0, rtol=0 if kernel == "cpu" else 1e-6)


# ---- levels, and the newest entries as they were computed ---------------------------------------


FORMS = [
    *(form for form in FORMATS.values() if not form.average),
    EntryFormat("k3v2", few(3), few(2)),
    EntryFormat("k1v1", few(1), few(1)),
]


@thinned(
    {
        "form": FORMS,
        "kernel": TRITON,
        "lengths": [[1, 1], [9, 4]],
        "tables,dim": [(1, 32), (2, 128)],
        "window,always": [(None, 0), (7, 0), (7, 1), (9, 20)],
    },
    together=2,
    rest=False,
)
def test_levels(
    form: EntryFormat,
    kernel: str,
    lengths: list[int],
    tables: int,
    dim: int,
    window: int | None,
    always: int,
) -> None:
    dtype = torch.float32 if tables == 1 else torch.float16
    rows = LevelRows(form, dim, dtype, tables, (60, 21))
    inputs = rows.inputs(lengths, window, always)
    assert_same(kernel, inputs, 4e-3 if dtype is HALF else 0.0)


DECODED: dict[str, list[Any]] = {
    "form": FORMS,
    "kernel": [*TRITON, "triton-in-19"],
    "dim": [16, 32, 64, 128, 256],
    "block,tables": [(16, 1), (48, 2), (64, 1)],
    "group": [1, 3, 4, 7, 20],
    "window,always": [(None, 0), (20, 0), (20, 40), (1, 1)],
    "cap": [0.0, 1.5],
    "beside": ["", "shares", "remainder", "sinks", "shares remainder sinks"],
}


@thinned(DECODED, rest=2)
def test_decoded_levels(
    form: EntryFormat,
    kernel: str,
    dim: int,
    block: int,
    tables: int,
    group: int,
    window: int | None,
    always: int,
    cap: float,
    beside: str,
) -> None:
    """A token of each row, one of which sees nothing, with all that attention may be asked for."""
    rows = LevelRows(form, dim, HALF, tables, (110, 1, 40), block=block, group=group)
    inputs = rows.inputs([1, 1, 1], window, always)
    q, _, _, names, chunks, _ = inputs
    chunks.last[:, 1] = -1
    how: dict[str, Any] = {"soft_cap": cap}
    if "shares" in beside:
        recent = torch.tensor([40, 1, 3]).clamp(max=window or 40)
        how["shares"] = Shares(torch.empty(q.shape[:2], dtype=torch.float32), recent)
    if "remainder" in beside:
        how["remainder"] = random_remainder(len(names), 4, dim)
    if "sinks" in beside:
        how["sinks"] = torch.randn(q.shape[1])
    assert_same(kernel, inputs, 4e-3, **how)


@pytest.mark.compiler
@thinned({"name": list(FORMATS), "dtype": BOTH, "dim": [16, 32, 48, 128]})
def test_compiled_levels(name: str, dtype: torch.dtype, dim: int) -> None:
    form, within = FORMATS[name], 1e-3 if FORMATS[name].few and dtype is torch.float32 else 0.0
    for tables in (1, 2):
        rows = LevelRows(form, dim, dtype, tables)
        for lengths in ([1, 1, 1], [40, 1, 1], [130]):
            assert_same("cpu", rows.inputs(lengths), within)


@pytest.mark.compiler
@pytest.mark.parametrize("tokens", [1, 128])
def test_every_number_of_e4m3_is_read_as_it_is(tokens: int) -> None:
    """Of both heads, the second of which has negative ones: as values, and as keys one by one."""
    form = FORMATS["fp8"]
    pool = torch.zeros(2, 1, form.block_bytes(16, 128, 1, 2), dtype=torch.uint8)
    keys, values = QuantizedBlocks(pool, form, 16, 128).layer(0)
    numbers = torch.arange(256, dtype=torch.uint8).view(2, 128)
    numbers[:, 127] = 0  # not a number
    expected = numbers.view(torch.float8_e4m3fn).float()
    one = torch.ones(()).to(torch.float8_e4m3fn).view(torch.uint8)
    for held in (keys, values):
        held.step[1] = 1.0
    tables, rows = torch.ones(1, 1, 1, dtype=torch.int32), torch.tensor([0])

    def attend(query: Tensor, entries: int) -> Tensor:
        last = torch.full((1, tokens), entries - 1)
        chunks = QuerySegments(rows, last, 2, torch.tensor([0, tokens]), tokens)
        return paged_attention_cpu(query, keys, values, tables, chunks, 1.0).float()

    values.levels[1, 0] = numbers
    found = attend(torch.zeros(tokens, 2, 128, dtype=torch.bfloat16), 1)
    assert torch.equal(found, expected.expand_as(found))
    keys.levels[1, 0], values.levels[1, 0] = numbers, one
    for first in range(0, 128, tokens):
        query = torch.zeros(tokens, 2, 128, dtype=torch.bfloat16)
        each = torch.arange(tokens)
        query[each, :, first + each] = 256.0
        weight = torch.sigmoid(256.0 * expected[:, first : first + tokens].T)  # beside a key of 0
        torch.testing.assert_close(attend(query, 2)[..., 0], weight, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("kernel", TRITON)
@pytest.mark.parametrize(
    ("name", "tables", "dim", "cap"),
    [
        ("k3v3", 2, 32, 0.0),
        pytest.param("k4v4", 1, 64, 0.0, marks=pytest.mark.slow),
        pytest.param("k2v2", 2, 16, 1.5, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [9, 3, 7]], ids=["decode", "chunks"])
def test_newest(
    kernel: str,
    name: str,
    tables: int,
    dim: int,
    cap: float,
    lengths: list[int],
    dtype: torch.dtype,
) -> None:
    """One softmax over both, a remainder and sinks; shares count the newest of both. Blocks of 16
    are a tile each."""
    block = 16 if dtype is HALF else 5
    inputs, how = NewestCase(FORMATS[name], dim, dtype, tables, block).call(lengths)
    assert_same(kernel, inputs, 4e-3 if dtype is HALF else 0.0, **how, soft_cap=cap)


def test_nothing_is_compiled_for_where_parts_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside newest entries: of 14 heads of a token the next part begins anywhere."""
    odd = set[str]()

    def launch(kernel: Kernel, grid: Any, *args: Any, **options: Any) -> None:
        for name, x in zip(kernel.source.__code__.co_varnames, args, strict=False):
            if isinstance(x, Tensor) and x.storage_offset() * x.itemsize % 16:
                odd.add(name)

    monkeypatch.setattr(Kernel, "launch", launch)
    q, kv = torch.empty(1, 14, 32, dtype=HALF), torch.empty(9, 16, 2, 32, dtype=HALF)
    tables, one = torch.ones(1, 1, 8, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    seen, shares = QuerySegments(0 * one, one[None], 128), Shares(q[..., 0].float(), one)
    newest = Newest(kv, kv, tables, seen, one)
    launcher.paged_attention_triton(q, kv, kv, tables, seen, 1.0, shares=shares, newest=newest)
    assert "part_recent" in odd <= UNALIGNED


@pytest.mark.compiler
@thinned(
    {
        "name": ["k4v4", "k3v3", "k2v2"],
        "dtype": BOTH,
        "dim": [16, 48, 128],
        "tables": [1, 2],
        "cap": [0.0, 1.5],
    }
)
def test_compiled_newest(name: str, dtype: torch.dtype, dim: int, tables: int, cap: float) -> None:
    case = NewestCase(FORMATS[name], dim, dtype, tables)
    for lengths in ([1, 1, 1], [1, 1, 7], [110], [40, 3, 7]):
        inputs, how = case.call(lengths)
        assert_same("cpu", inputs, 1e-3 if dtype is torch.float32 else 0.0, **how, soft_cap=cap)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("dim", [16, 48, 128])
@pytest.mark.parametrize("form", [*FORMATS, "newest"])
def test_a_token_alone_and_in_a_chunk_is_the_same_to_the_last_bit(
    form: str, dtype: torch.dtype, dim: int
) -> None:
    """Or its own entries, which are rounded, could go to another level."""
    kind = NewestCase if form == "newest" else LevelRows
    rows = kind(FORMATS.get(form, FORMATS["k4v4"]), dim, dtype)
    end, q = rows.held[0], rows.q

    def attend(count: int) -> Tensor:
        if isinstance(rows, NewestCase):
            inputs, how = rows.call([count])
            return paged_attention_cpu(*inputs, **how)
        return paged_attention_cpu(*rows.inputs([count]))

    together = attend(110)
    for token in range(110):
        rows.held[0], rows.q = end - 109 + token, q[token:]
        assert torch.equal(attend(1)[0], together[token])
