"""What is done to blocks: torch against plain indexing, each other kernel against torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.engine.cache.level_entries import QuantizedEntries
from kvserve.entry_format import FORMATS, EntryFormat
from kvserve.kernels.layer.elementwise_triton import rotate_triton
from kvserve.kernels.move.move_kv import mean_in_pieces, mean_kv, mean_of
from kvserve.kernels.move.move_levels import mean_levels
from kvserve.kernels.storage import COMPILED, TORCH, TRITON, StorageKernels
from kvserve.kernels.store.quantized_entries import QuantizedBlocks, quantize
from kvserve.kernels.store.slot_mapping import slot_mapping
from kvserve.kernels.store.store_kv_triton import rotate_and_store_torch, rotate_and_store_triton
from kvserve.scheduler.layout import Granularity, KVLayout
from tests.kernels.test_quantized_entries import vectors

pytestmark = pytest.mark.usefixtures("device")
BLOCKS = 400
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


# ---- torch against plain indexing ---------------------------------------------------------------


def entry(cache: Tensor, layout: KVLayout, tables: Tensor, *at: int) -> Tensor:
    """[2, D]: key and value of (layer, kv head, row, position), by plain indexing."""
    layer, head, row, position = at
    group, place = divmod(layer, layout.layers_per_block)
    table, lane = divmod(head, layout.heads_per_block)
    block = tables[group, row, table, position // layout.block_size]
    return cache[block, place, :, position % layout.block_size, lane]


@pytest.mark.parametrize("granularity", list(Granularity))
def test_store_gather_and_move(granularity: Granularity) -> None:
    layout = KVLayout(3, 2, 4, 4, granularity)
    shape = layout.layer_groups, 3, layout.rows, 4
    tables = (torch.randperm(BLOCKS - 1)[: 12 * layout.groups] + 1).int().view(shape)
    cache = torch.full(layout.cache_shape(BLOCKS), float("nan"))
    rows, positions = torch.tensor([2, 2, 0, 1, 2]), torch.tensor([0, 1, 7, 15, 2])
    lanes = positions.expand(layout.layer_groups, layout.rows, -1)
    slots = slot_mapping(tables, rows, lanes, layout.block_size)
    stored = torch.randn(layout.num_layers, 2, len(rows), layout.num_kv_heads, layout.head_dim)
    every = torch.cartesian_prod(torch.arange(3), torch.arange(2)).tolist()
    for layer in range(layout.num_layers):
        group, place = divmod(layer, layout.layers_per_block)
        TORCH.store_kv(cache, place, slots[group], *stored[layer])
    for layer, head in every:
        for t, at in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            got = entry(cache, layout, tables, layer, head, *at)
            assert torch.equal(got, stored[layer, :, t, head])
    all_slots = slot_mapping(tables, rows, positions.expand(3, 2, -1), layout.block_size)
    for kind in (0, 1):
        found = TORCH.gather_kv(cache, all_slots, None, bool(kind))
        assert torch.equal(found, stored[:, kind].transpose(1, 2))

    # Each lane swaps its own two entries of row 2: the reference reads all before it writes any.
    pair = torch.randint(0, 2, (3, 2, 1))
    pair, two = torch.cat([pair, 1 - pair], dim=-1), torch.tensor([2, 2])
    src = slot_mapping(tables, two, pair, layout.block_size)
    dst = slot_mapping(tables, two, torch.tensor([0, 1]).expand(3, 2, -1), layout.block_size)
    before = cache.clone()
    TORCH.move_kv(cache, src, dst)
    for layer, head in every:
        for place in range(2):
            got = entry(cache, layout, tables, layer, head, 2, place)
            source = int(pair[layer, head, place])
            assert torch.equal(got, entry(before, layout, tables, layer, head, 2, source))
    moved = (cache != before) & ~(cache.isnan() & before.isnan())
    assert moved.sum() <= 2 * 2 * 3 * 2 * layout.head_dim


def test_query_log_shares_the_pool_without_touching_other_blocks() -> None:
    layout = KVLayout(3, 2, 4, 4)
    cache = torch.zeros(layout.cache_shape(BLOCKS))
    log = cache.view(BLOCKS, 3, 2 * layout.block_size, 2, 4)
    slots, queries = torch.tensor([[8 * 5 + 3, 8 * 6 + 7]]), torch.randn(3, 2, 2, 4)
    for layer in range(3):
        TORCH.store_queries(log, layer, slots, queries[layer])
    found = TORCH.gather_queries(log, slots.expand(3, 2, -1))
    assert torch.equal(found, queries.transpose(1, 2))
    assert cache.flatten(1).any(dim=1).nonzero().flatten().tolist() == [5, 6]


# ---- numbers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A layout, a cache of random numbers in it, and the kernels that are tried on it."""

    kernels: StorageKernels
    layout: KVLayout
    cache: Tensor

    def slots(self, *shape: int) -> Tensor:
        """Outside of block 0, none twice in a lane."""
        *lanes, count = shape
        size = self.layout.block_size
        return torch.rand(*lanes, (BLOCKS - 1) * size).argsort(-1)[..., :count] + size

    def lanes(self, count: int) -> Tensor:
        """Of all layers and heads."""
        return self.slots(self.layout.num_layers, self.layout.num_kv_heads, count)


VARIANTS = [
    *((TRITON, Granularity.MODEL, 16, 64, F16), (TRITON, Granularity.LAYER, 5, 128, BF16)),
    (TRITON, Granularity.HEAD, 4, 16, F32),
    *(
        pytest.param((COMPILED, granularity, 4, 24, dtype), marks=pytest.mark.compiler)
        for granularity in Granularity
        for dtype in (F32, BF16)
    ),
]


def named(value: Any) -> str:
    if isinstance(value, StorageKernels):
        return "triton" if value is TRITON else "cpu"
    return str(getattr(value, "value", value))


@pytest.fixture(params=VARIANTS, ids=lambda v: "-".join(map(named, v)))
def place(request: pytest.FixtureRequest, device: str) -> Place:
    kernels, granularity, block, dim, dtype = request.param
    layout = KVLayout(2, 2, dim, block, granularity)
    return Place(kernels, layout, torch.randn(layout.cache_shape(BLOCKS)).to(dtype))


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_store(place: Place, tokens: int) -> None:
    """Keys and values are views of one projection, as a model hands them over."""
    layout, expected = place.layout, place.cache.clone()
    both = torch.randn(tokens, 2 * layout.num_kv_heads, layout.head_dim).to(expected.dtype)
    slots = place.slots(layout.rows, tokens)
    for layer in range(layout.layers_per_block):
        TORCH.store_kv(expected, layer, slots, *both.chunk(2, dim=1))
        place.kernels.store_kv(place.cache, layer, slots, *both.chunk(2, dim=1))
    assert torch.equal(place.cache, expected)


def test_means(place: Place) -> None:
    """Of two events, whose lanes differ in how many entries count."""
    cache, slots, counts = (
        place.cache,
        place.lanes(14),
        torch.tensor([[[0, 1], [7, 4]], [[7, 0], [3, 5]]]),
    )
    keys, values = TORCH.gather_kv(cache, slots), TORCH.gather_kv(cache, slots, None, True)
    found = mean_kv(cache, slots, counts, lambda *_: keys, lambda *_: values)
    for event, layer, head in itertools.product(range(2), repeat=3):
        count, at = int(counts[event, layer, head]), (event, layer, head)
        run = slice(7 * event, 7 * event + count)
        for mean, x in zip(found, (keys, values), strict=False):
            expected = x[layer, head, run].float().sum(dim=0) / max(count, 1)
            torch.testing.assert_close(mean[at], expected)
        torch.testing.assert_close(found.bias[at].exp(), torch.tensor(float(count)))


@pytest.mark.parametrize("at_once", [1, 12, 48, 2**18])
def test_means_in_pieces(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a layer, some layers, and all: of three runs of 8, some of which lose nothing."""
    keys, values = torch.randn(2, 5, 2, 24, 8)
    slots = torch.arange(24).expand(5, 2, -1)
    counts = torch.randint(0, 9, (3, 5, 2))
    counts[0, 0], counts[1, 1] = 0, 8
    monkeypatch.setattr("kvserve.kernels.move.move_kv._AT_ONCE", at_once)

    def read(held: Tensor) -> Callable[[Tensor, range | None], Tensor]:
        def gather(slots: Tensor, layers: range | None) -> Tensor:
            own = held if layers is None else held[list(layers)]
            return own.gather(2, slots[..., None].expand(-1, -1, -1, 8))

        return gather

    found = mean_in_pieces(read(keys), read(values), slots, counts)
    for mean, expected in zip(found, mean_of(keys, values, counts), strict=True):
        torch.testing.assert_close(mean, expected)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("logged", [1, 3])
@pytest.mark.parametrize("logged_as", [None, torch.uint8])
def test_queries(place: Place, logged_as: torch.dtype | None, logged: int, group: int) -> None:
    """Means over groups; what goes to block 0 is nobody's, and what is left of blocks stays as it
    was: of every KV head one or three vectors are logged."""
    layout, cache, kernels = place.layout, place.cache, place.kernels
    memory = cache.flatten(2) if logged_as is None else cache.flatten(2).view(logged_as)
    heads = logged * layout.num_kv_heads
    vector = heads // layout.rows * layout.head_dim
    tokens, left = divmod(memory.shape[-1], vector)
    assert bool(left) is (logged == 3)

    def as_log(memory: Tensor) -> Tensor:
        shape = tokens, heads // layout.rows, layout.head_dim
        return memory[..., : tokens * vector].unflatten(-1, shape)

    log, before = as_log(memory), memory.clone()
    expected = as_log(memory.clone())
    slots = torch.rand(layout.rows, (BLOCKS - 1) * tokens).argsort(-1)[:, :5] + tokens
    slots[:, 2] = tokens - 1
    query = (50 * torch.randn(5, group * heads, layout.head_dim)).to(cache.dtype)
    TORCH.store_queries(expected, 0, slots, query)
    kernels.store_queries(log, 0, slots, query)
    within = 2**-7 if kernels is COMPILED and group > 1 and logged_as is None else 0.0
    torch.testing.assert_close(log[1:], expected[1:], atol=0.0, rtol=within)
    assert torch.equal(memory[..., tokens * vector :], before[..., tokens * vector :])
    wanted, layers = place.slots(layout.num_layers, heads, 9), torch.tensor([1])
    wanted = wanted % (BLOCKS * tokens)
    for ids, some in ((None, wanted), (layers, wanted[layers])):
        found = kernels.gather_queries(log, some, ids)
        assert torch.equal(found, TORCH.gather_queries(log, some, ids))


def test_gather(place: Place) -> None:
    slots, layers = place.lanes(70), torch.tensor([1, 0])
    for given in ((slots, None), (slots[layers], layers), (slots[..., :0], None)):
        for values in (False, True):
            found = place.kernels.gather_kv(place.cache, *given, values)
            assert torch.equal(found, TORCH.gather_kv(place.cache, *given, values))


@pytest.mark.parametrize("in_place", [True, False])
def test_moves(place: Place, in_place: bool) -> None:
    """Two events of unequal counts, longer than a tile, in place and into blocks of their own."""
    layout, held, kept = place.layout, 90, 80
    lanes, columns = (layout.num_layers, layout.num_kv_heads), -(-held // layout.block_size)
    blocks = torch.randperm(BLOCKS - 1)[: 4 * layout.groups * columns] + 1
    old, new = blocks.view(2, layout.layer_groups, 2, layout.rows, columns)
    # The first three stay where they are, and of the second event the last eleven do not exist.
    entries = torch.rand(*lanes, 2, held - 3).argsort(-1)[..., : kept - 3].sort(-1).values + 3
    entries = torch.cat([torch.arange(3).expand(*lanes, 2, 3), entries], dim=-1).flatten(2)
    at = torch.arange(kept).expand(*lanes, 2, kept).flatten(2)
    exists = (torch.arange(kept) < torch.tensor([[kept], [kept - 11]])).flatten()
    rows = torch.arange(2).repeat_interleave(kept)
    src = slot_mapping(old, rows, entries, layout.block_size)
    dst = slot_mapping(old if in_place else new, rows, at, layout.block_size)
    dst = torch.where(exists, dst, 0)
    before, expected = place.cache.clone(), place.cache.clone()
    TORCH.move_kv(expected, src, dst)
    place.kernels.move_kv(place.cache, src, dst, runs=2)
    assert torch.equal(place.cache[1:], expected[1:])
    assert not torch.equal(place.cache, before)


# ---- rotated on the way -------------------------------------------------------------------------


def projected(layout: KVLayout, tokens: int, group: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries and keys, values behind them in the same rows, cosines and sines."""
    heads = layout.num_kv_heads
    both = torch.randn(tokens, (group + 2) * heads, layout.head_dim).to(dtype)
    angles = torch.randn(2, tokens, 1, layout.head_dim).to(dtype)
    return *both.split([(group + 1) * heads, heads], dim=1), *angles


# The interpreter rounds to bfloat16 in its own way: that is for a GPU.
@pytest.mark.parametrize("dtype", [F32, F16, *([BF16] * torch.cuda.is_available())], ids=str)
@pytest.mark.parametrize("granularity", list(Granularity), ids=named)
@pytest.mark.parametrize(
    ("tokens", "group", "dim", "block"), [(1, 4, 16, 4), (5, 7, 70, 5), (0, 2, 8, 4)]
)
def test_rotated(
    granularity: Granularity, tokens: int, group: int, dim: int, block: int, dtype: torch.dtype
) -> None:
    """Bit for bit what the two kernels that it replaces give. The last token has no slot."""
    layout = KVLayout(2, 3, dim, block, granularity)
    cache = torch.randn(layout.cache_shape(40)).to(dtype)
    qk, v, cos, sin = projected(layout, tokens, group, dtype)
    slots = (torch.randperm(39 * block)[: layout.rows * tokens] + block).view(layout.rows, tokens)
    expected, by_torch = cache.clone(), cache.clone()
    outside = slots.clone()
    outside[:, 1:] = 1 << 40
    for place in range(layout.layers_per_block):
        q = rotate_and_store_triton(cache, place, outside, qk, v, cos, sin)
        right, k = rotate_triton(qk, cos, sin).split([3 * group, 3], dim=1)
        TRITON.store_kv(expected, place, outside, k, v)
        assert torch.equal(q, right)
        some = [x[:1] for x in (qk, v, cos, sin)]
        rotate_and_store_torch(by_torch, place, slots[:, :1], *some)
        other = rotate_and_store_torch(by_torch.clone(), place, slots, qk, v, cos, sin)
        torch.testing.assert_close(q, other, atol=2e-3, rtol=2e-3)
    assert torch.equal(cache, expected)
    torch.testing.assert_close(cache, by_torch, atol=2e-3, rtol=2e-3)


# ---- levels -------------------------------------------------------------------------------------

BLOCK, DIM = 16, 64
LEVELS = [form for form in FORMATS.values() if not form.few]
FORM = pytest.mark.parametrize("form", LEVELS, ids=lambda form: form.name)


def pool_of(form: EntryFormat, dim: int, heads: int = 2) -> QuantizedBlocks:
    """Full of other bytes at first."""
    pool = torch.full((20, 3, form.block_bytes(BLOCK, dim, 1, heads)), 7, dtype=torch.uint8)
    return QuantizedBlocks(pool, form, BLOCK, dim)


@FORM
@pytest.mark.parametrize("rows", [1, 2])
def test_levels_are_what_the_rounding_says(form: EntryFormat, rows: int) -> None:
    blocks = pool_of(form, 32, heads=2 // rows)
    slots = (torch.randperm(19 * BLOCK)[: 40 * rows] + BLOCK).view(rows, -1)
    both = [(vectors(40, 2, 32), vectors(40, 2, 32)) for _ in range(3)]
    for layer, new in enumerate(both):
        TORCH.store_levels(blocks, layer, slots, *new)
    by_lane, only = slots.repeat_interleave(2 // rows, dim=0).expand(3, -1, -1), torch.tensor([2])
    keys, values = (torch.stack(x) for x in zip(*both, strict=True))
    read = partial(TORCH.gather_levels, blocks, dtype=F32)
    for kind, x, of in ((False, keys, form.key), (True, values, form.value)):
        expected = quantize(x, of).widened().transpose(1, 2)
        assert torch.equal(read(by_lane, None, values=kind), expected)
        assert torch.equal(read(by_lane[2:], only, values=kind), expected[2:])
    # Two entries of each lane change places: both are read before either is written.
    pair, before = by_lane[..., :2], read(by_lane[..., :2], None)
    TORCH.move_levels(blocks, pair, pair.flip(-1), 1)
    assert torch.equal(read(pair, None), before.flip(-2))
    assert (blocks.pool[0] == 7).all()


@pytest.mark.parametrize(
    ("kernels", "dim", "dtype"),
    [
        *((TRITON, DIM, dtype) for dtype in (F32, F16)),
        *(
            pytest.param(COMPILED, dim, dtype, marks=pytest.mark.compiler)
            for dim in (16, 48, 128)
            for dtype in (F32, BF16)
        ),
    ],
    ids=named,
)
@FORM
def test_levels(form: EntryFormat, kernels: StorageKernels, dim: int, dtype: torch.dtype) -> None:
    """The same bytes, and the same numbers of them."""
    ours, theirs = pool_of(form, dim), pool_of(form, dim)
    slots = torch.randperm(18 * BLOCK)[:40][None] + BLOCK
    for layer in range(3):
        wide = vectors(40, 5, dim) if kernels is COMPILED else torch.randn(40, 5, dim)
        key, value = wide.to(dtype)[:, :2], wide.to(dtype)[:, 2:4]
        kernels.store_levels(ours, layer, slots, key, value)
        TORCH.store_levels(theirs, layer, slots, key, value)
    assert torch.equal(ours.pool, theirs.pool)
    lanes = slots.expand(3, 2, -1).contiguous()
    for values in (False, True):
        found, expected = (
            each.gather_levels(ours, lanes, None, dtype, values) for each in (kernels, TORCH)
        )
        # Triton may round the sum with a low once less.
        within = 0.0 if kernels is COMPILED else 1e-6
        torch.testing.assert_close(found, expected, atol=within, rtol=within)
    if kernels is COMPILED and form.key.bits == 8 and not form.key.e4m3:
        entries = QuantizedEntries(ours, kernels, dtype)
        exact = TORCH.gather_levels(theirs, lanes, None, F32)
        assert torch.equal(entries.scored(lanes, None).float(), exact)
    counts = torch.tensor([[0, 1], [9, 20], [20, 7]]).expand(2, 3, 2)
    key, value = (TORCH.gather_levels(ours, lanes, None, dtype, of) for of in (False, True))
    means = mean_levels(ours, lanes, counts, dtype, lambda *_: key, lambda *_: value)
    # Numbers of a channel differ a millionfold, and cancel out.
    for mean, expected in zip(means, mean_of(key, value, counts), strict=True):
        torch.testing.assert_close(mean, expected, atol=1e-5, rtol=1e-4)
    for each, pool in ((kernels, ours), (TORCH, theirs)):
        each.move_levels(pool, lanes[..., :10], lanes[..., 10:20], 1)
    assert torch.equal(ours.pool, theirs.pool)


# ---- what is not there --------------------------------------------------------------------------


def test_triton_leaves_slots_outside_of_the_cache_alone() -> None:
    cache, new = torch.randn(3, 1, 2, 4, 1, 16), torch.randn(3, 1, 16)
    levels = pool_of(FORMATS["int8"], 16, heads=1)
    before, bytes_before = cache.clone(), levels.pool.clone()
    inside, outside = torch.tensor([[[4, 5, 6]]]), torch.tensor([[[-1, 12, 1 << 40]]])
    far = torch.tensor([[[-1, 320, 1 << 40]]])
    TRITON.store_kv(cache, 0, outside[0], new, new)
    TRITON.store_levels(levels, 0, far[0], new, new)
    for src, dst in ((0, 1), (1, 0)):
        TRITON.move_kv(cache, (outside, inside)[src], (outside, inside)[dst])
        TRITON.move_levels(levels, (far, inside + 16)[src], (far, inside + 16)[dst])
    assert torch.equal(cache, before) and torch.equal(levels.pool, bytes_before)
    assert not TRITON.gather_kv(cache, outside).any()
    assert not TRITON.gather_levels(levels, far, None, F32).any()


@pytest.mark.compiler
def test_compiled_kernels_do_not_write_block_0() -> None:
    cache = torch.randn(12, 4, 2, 4, 2, 24)
    before, src = cache.clone(), torch.full((4, 2, 3), 9)
    COMPILED.move_kv(cache, src, torch.tensor([0, 2, 3]).expand_as(src))
    assert torch.equal(cache, before)


@pytest.mark.compiler
@pytest.mark.parametrize("slot", [-1, 160, 2**40])
def test_compiled_kernels_refuse_slots_outside_of_the_pool(slot: int) -> None:
    """Before anything is written."""
    cache, log, new = (
        torch.zeros(20, 1, 2, 8, 2, 16),
        torch.zeros(20, 1, 8, 2, 16),
        torch.ones(3, 2, 16),
    )
    pool = torch.zeros(20, 1, FORMATS["int8"].block_bytes(8, 16, 1, 2), dtype=torch.uint8)
    levels = QuantizedBlocks(pool, FORMATS["int8"], 8, 16)
    wrong, fine = torch.tensor([[8, 9, slot]]), torch.tensor([[8, 9, 10]]).expand(1, 2, -1)
    lanes = wrong.expand(1, 2, -1)
    unread: Any = (None, None)
    calls: dict[str, Callable[[], object]] = {
        "store_kv": lambda: COMPILED.store_kv(cache, 0, wrong, new, new),
        "store_queries": lambda: COMPILED.store_queries(log, 0, wrong, new),
        "gather_kv": lambda: COMPILED.gather_kv(cache, lanes),
        "move_kv": lambda: COMPILED.move_kv(cache, fine, lanes),
        "move_kv: slot": lambda: COMPILED.move_kv(cache, lanes, fine + 8),
        "mean_kv": lambda: mean_kv(cache, lanes, lanes[None, ..., 0], *unread),
        "mean_levels": lambda: mean_levels(levels, lanes, lanes[None, ..., 0], F32, *unread),
        "store_levels": lambda: COMPILED.store_levels(levels, 0, wrong, new, new),
        "gather_levels": lambda: COMPILED.gather_levels(levels, lanes, None, F32),
        "move_levels": lambda: COMPILED.move_levels(levels, fine, lanes),
    }
    for name, call in calls.items():
        with pytest.raises(IndexError, match=f"{name}.* {slot} is not in a pool of 20 blocks of 8"):
            call()
    assert not cache.any() and not log.any() and not pool.any()


@pytest.mark.compiler
def test_compiled_kernels_refuse_what_does_not_fit() -> None:
    cache, log, new = (
        torch.zeros(20, 3, 2, 8, 2, 16),
        torch.zeros(20, 3, 8, 2, 16),
        torch.ones(3, 2, 16),
    )
    slots, levels = torch.tensor([[8, 9, 10]]), pool_of(FORMATS["int8"], 16)
    lanes, store, odd = slots.expand(3, 2, -1), COMPILED.store_kv, torch.ones(3, 3, 16)
    shapes, types = r"new entries \[3, 1, 16\] .*: \[3, 2, 16\] is needed", "new entries of torch.f"
    refused: list[tuple[str, Callable[[], object]]] = [
        (shapes, lambda: store(cache, 0, slots, new[:, :1], new)),
        (types, lambda: store(cache, 0, slots, new, new.double())),
        ("slots of torch.int32", lambda: store(cache, 0, slots.int(), new, new)),
        (r"new entries \[3, 3, 16\]", lambda: COMPILED.store_queries(log, 0, slots, odd)),
        (types, lambda: COMPILED.store_queries(log, 0, slots, new.double())),
        ("move_kv", lambda: COMPILED.move_kv(cache, lanes, lanes[..., :2])),
        ("have to be dense", lambda: COMPILED.gather_kv(cache[:, ::2], lanes)),
        (
            r"\[2, 2, 16\] of .* is needed",
            lambda: COMPILED.store_levels(levels, 0, slots[:, :2], new, new),
        ),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.usefixtures("untouched_memory")
def test_offsets_exceed_31_bits() -> None:
    cache = torch.empty(70_000, 2, 2, 64, 2, 64, dtype=torch.uint8)
    assert cache.numel() > 2**31
    last = (cache.shape[0] - 1) * 64
    new = torch.arange(1, 5 * 2 * 64 + 1).to(torch.uint8).view(5, 2, 64)
    slots = last + torch.arange(5)
    TRITON.store_kv(cache, 1, slots[None], new, new)
    assert torch.equal(cache[-1, 1, 0, :5], new)
    src, dst = (x.expand(2, 2, -1) for x in (slots[1:], last - 64 + torch.arange(4)))
    TRITON.move_kv(cache, src, dst)
    assert torch.equal(cache[-2, 1, 1, :4], new[1:])
    assert torch.equal(TRITON.gather_kv(cache, dst)[1], new[1:].transpose(0, 1))


@pytest.mark.usefixtures("untouched_memory")
def test_rotated_offsets_exceed_31_bits() -> None:
    layout = KVLayout(2, 2, 64, 64)
    cache = torch.empty(layout.cache_shape(35_000), dtype=F16)
    assert cache.nbytes > 2**31
    qk, v, _, _ = projected(layout, 5, 1, F16)
    slots = torch.arange(5)[None] + (len(cache) - 1) * layout.block_size
    zeros = torch.zeros(5, 1, 64, dtype=F16)
    rotate_and_store_triton(cache, 1, slots, qk, v, zeros + 1, zeros)
    assert torch.equal(cache[-1, 1, 0, :5], qk[:, 2:]) and torch.equal(cache[-1, 1, 1, :5], v)


@pytest.mark.compiler
def test_offsets_beyond_what_32_bits_hold() -> None:
    """A cache of 3 * 2^30 numbers, of which nothing but what is stored here is ever touched."""
    layers = 2**21
    cache, new = torch.empty(3, layers, 2, 8, 2, 16, dtype=BF16), torch.randn(8, 2, 16).to(BF16)
    COMPILED.store_kv(cache, layers - 1, torch.arange(16, 24)[None], new, new.neg())
    assert torch.equal(cache[2, layers - 1, 0], new)
