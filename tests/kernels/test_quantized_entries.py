"""Entries held as levels: the rounding and its bound, and the compiled kernels beside torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvserve.entry_format import FORMATS, EntryFormat, VectorForm
from kvserve.kernels.attention.paged_attention import paged_attention_torch
from kvserve.kernels.attention.paged_attention_cpu import CpuQuerySegments, paged_attention
from kvserve.kernels.quantized_entries import (
    COMPILED,
    TORCH,
    QuantizedBlocks,
    QuantizedKernels,
    quantize,
)
from kvserve.kernels.query_segments import QuerySegments
from tests.thinning import thinned

EACH = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
FORMS = sorted({form for each in FORMATS.values() for form in (each.key, each.value)}, key=str)
EVERY_FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.code}-{form.group}")
BLOCK = 16
SCALE = 0.3


def vectors(*shape: int, seed: int = 0) -> Tensor:
    """Some large, some tiny, one of zeros, one of equal numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + 0.2
    x *= torch.logspace(-20, 20, len(x)).view(-1, *[1] * (len(shape) - 1))
    x[0], x[1] = 0.0, 1.3
    return x


# ---- the rounding ------------------------------------------------------------------------------


def bound(x: Tensor, form: VectorForm) -> Tensor:
    """As the module's docstring states it: [..., D]."""
    step = quantize(x, form).step.float()
    step = step.repeat_interleave(x.shape[-1] // step.shape[-1], dim=-1)
    return torch.maximum(x.abs() / 16, step * 2**-10) if form.e4m3 else step / 2


@EVERY_FORM
@pytest.mark.parametrize("dim", [16, 48, 64])
def test_numbers_are_held_within_half_a_step(form: VectorForm, dim: int) -> None:
    x = vectors(500, 3, dim)
    held, groups = quantize(x, form), form.groups(dim)
    assert held.levels.dtype is torch.uint8 and held.levels.shape[-1] == form.levels(dim)
    assert groups == (2 if form.group and dim == 64 else 1)
    # In the last bits float32 rounds the sum with low.
    assert ((held.widened() - x).abs() <= bound(x, form) * (1 + 1e-6) + x.abs() * 1e-6).all()
    x = x.unflatten(-1, (groups, -1))
    span = x.abs().amax(-1)
    if form.low:  # rounded down to bfloat16, it adds to the range
        span = x.amax(-1) - x.amin(-1) + 2**-7 * span
    assert (held.step.float() <= span / form.most * (1 + 2**-7)).all()


@EVERY_FORM
def test_stored_numbers_are_those_of_the_rule_in_float64(form: VectorForm) -> None:
    """Written down again, number by number: every operation in float64, then rounded to float32.
    Numbers of bfloat16 lie in the middle of two levels now and then; those go to the even one."""
    x = torch.cat([vectors(60, 64), vectors(300, 64, seed=1).bfloat16().float()])
    held, groups, ties = quantize(x, form), form.groups(64), 0
    for row, vector in enumerate(x.double().view(len(x), groups, -1).tolist()):
        for g, group in enumerate(vector):
            low = -upwards(-min(group)) if form.low else 0.0
            span = max(group) - low if form.low else max(map(abs, group))
            step = upwards(float32(float32(span) / form.most))
            assert held.step[row, g] == step
            assert held.low is None or held.low[row, g] == low
            for i, number in enumerate(group):
                exact = float32(float32(number - low) / (step or 1.0))
                ties += abs(exact) % 1 == 0.5
                least = 0 if form.low else -form.most
                level = round(max(least, min(form.most, exact)))  # Python's ties go to even, too
                assert form.e4m3 or level_of(held.levels[row], g * len(group) + i, form) == level
    assert form.e4m3 or ties > 10


def float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def upwards(x: float) -> float:
    """The least bfloat16 number that is not below ``x``."""
    near = torch.tensor(x, dtype=torch.float32).bfloat16()
    more = torch.nextafter(near, torch.tensor(torch.inf, dtype=torch.bfloat16))
    return float(near if float(near) >= x else more)


def level_of(levels: Tensor, channel: int, form: VectorForm) -> int:
    if not form.low:
        return int(levels[channel].view(torch.int8))
    plane, byte = divmod(channel, len(levels))
    return int(levels[byte]) >> plane * form.bits & form.most


@EVERY_FORM
def test_special_vectors(form: VectorForm) -> None:
    zeros = quantize(torch.zeros(2, 16), form)
    assert not zeros.widened().any()
    ends = torch.tensor([-5.0, 3.0] * 8)
    assert quantize(ends, form).widened().abs().max() >= 5.0 * (1 - 1 / 16)
    equal = quantize(torch.full((16,), 0.7), form).widened()
    assert (equal == equal[0]).all() and abs(equal[0] - 0.7) < 0.7 / 16


@EVERY_FORM
def test_channels_keep_their_order(form: VectorForm) -> None:
    x = torch.arange(64.0) % (form.most + 1)
    x[::32] = form.most  # so that every group has steps of 1
    if not form.e4m3:
        assert torch.equal(quantize(x, form).widened(), x)


def test_bytes() -> None:
    """At D = 128, of bfloat16's 512."""
    sizes = {name: form.entry_bytes(128) for name, form in FORMATS.items()}
    assert sizes == {"int8": 260, "k8v4": 198, "k4v4": 160, "k4v2": 128, "fp8": 260}
    for form in FORMATS.values():
        assert form.lane_bytes(16, 32) == 16 * form.entry_bytes(32)
        assert form.lane_bytes(1, 16) % 16 == 0
        assert (form.refusal(24) is None) == (min(form.key.bits, form.value.bits) == 8)
        assert form.refusal(48) is None


# ---- blocks ------------------------------------------------------------------------------------


class Pool:
    """Blocks of ``layers`` layers and ``heads`` heads, full of other bytes at first."""

    def __init__(self, form: EntryFormat, dim: int, blocks: int = 20, heads: int = 2) -> None:
        shape = blocks, 3, heads * form.lane_bytes(BLOCK, dim)
        self.bytes = torch.full(shape, 7, dtype=torch.uint8)
        self.blocks = QuantizedBlocks(self.bytes, form, BLOCK, dim)

    def fill(self, kernels: QuantizedKernels, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys of all layers, [3, T, Hkv, D]."""
        rows, (*_, heads, dim) = len(slots), self.blocks.keys.shape
        shape = slots.shape[1], rows * heads, dim
        keys = [vectors(*shape, seed=layer).to(dtype) for layer in range(3)]
        for layer, key in enumerate(keys):
            # As a model hands them over: a view of one projection.
            wide = torch.cat([key, key.flip(1) * 0.5, key], dim=1)
            own = wide[:, : shape[1]], wide[:, shape[1] : 2 * shape[1]]
            kernels.store(self.blocks, layer, slots, *own)
        return torch.stack(keys)


def some_slots(count: int, rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randperm(19 * BLOCK, generator=generator)[: count * rows].view(rows, -1) + BLOCK


@EACH
@pytest.mark.parametrize("rows", [1, 2])
def test_store_gather_and_move(form: EntryFormat, rows: int) -> None:
    pool, slots = Pool(form, 32, heads=2 // rows), some_slots(40, rows)
    keys = pool.fill(TORCH, slots, torch.float32)
    by_lane = slots.repeat_interleave(2 // rows, dim=0).expand(3, -1, -1)
    expected = quantize(keys, form.key).widened().transpose(1, 2)
    assert torch.equal(TORCH.gather(pool.blocks, by_lane, None, torch.float32), expected)
    values = quantize(keys.flip(2) * 0.5, form.value).widened().transpose(1, 2)
    found = TORCH.gather(pool.blocks, by_lane, None, torch.float32, True)
    assert torch.equal(found, values)
    only = torch.tensor([2])
    assert torch.equal(TORCH.gather(pool.blocks, by_lane[2:], only, torch.float32), expected[2:])
    # Two entries of each lane change places: both are read before either is written.
    pair = by_lane[..., :2]
    TORCH.move(pool.blocks, pair, pair.flip(-1), 1)
    assert torch.equal(
        TORCH.gather(pool.blocks, pair, None, torch.float32), expected[:, :, :2].flip(-2)
    )
    assert (pool.bytes[0] == 7).all()


@pytest.mark.compiler
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 48, 128])
def test_the_compiled_kernels_give_the_same_bytes(
    form: EntryFormat, dtype: torch.dtype, dim: int
) -> None:
    pools, slots = [Pool(form, dim) for _ in range(2)], some_slots(40)
    by_lane = slots.expand(3, 2, -1).contiguous()
    found = []
    for pool, kernels in zip(pools, (TORCH, COMPILED), strict=True):
        pool.fill(kernels, slots, dtype)
        kernels.move(pool.blocks, by_lane[..., :10], by_lane[..., 10:20], 1)
        gather: Callable[..., Tensor] = kernels.gather
        found.append(torch.stack([gather(pool.blocks, by_lane, None, dtype, x) for x in (0, 1)]))
    assert torch.equal(pools[0].bytes, pools[1].bytes)
    assert torch.equal(*found)


@pytest.mark.compiler
def test_the_compiled_kernels_refuse() -> None:
    pool = Pool(FORMATS["int8"], 16)
    before = pool.bytes.clone()
    x = torch.randn(2, 2, 16)
    with pytest.raises(IndexError, match=r"slot 320 is not in a pool of 20 blocks of 16"):
        COMPILED.store(pool.blocks, 0, torch.tensor([[16, 320]]), x, x)
    with pytest.raises(ValueError, match=r"\[3, 2, 16\] of .* is needed"):
        COMPILED.store(pool.blocks, 0, torch.tensor([[16, 17, 18]]), x, x)
    lanes = torch.full((3, 2, 1), -1)
    with pytest.raises(IndexError, match="slot -1"):
        COMPILED.gather(pool.blocks, lanes, None, torch.float32)
    with pytest.raises(IndexError, match="slot -1"):
        COMPILED.move(pool.blocks, lanes + 17, lanes, 1)
    assert torch.equal(pool.bytes, before)


# ---- attention ---------------------------------------------------------------------------------


class Rows:
    """Three rows of random entries: layer 1 of a pool of two."""

    def __init__(self, form: EntryFormat, dim: int, dtype: torch.dtype, tables: int = 1) -> None:
        generator = torch.Generator().manual_seed(3)
        self.held, self.heads = [200, 1, 77], 4 // tables
        columns = 13
        count = 3 * tables * columns
        names = torch.randperm(count, generator=generator).to(torch.int32) + 1
        self.tables = names.view(1, 3, tables, columns)
        # What no row holds reads as not a number.
        shape = count + 1, 2, self.heads * form.lane_bytes(BLOCK, dim)
        pool = torch.full(shape, 255, dtype=torch.uint8)
        self.blocks = QuantizedBlocks(pool, form, BLOCK, dim)
        for row, length in enumerate(self.held):
            place = torch.arange(length)
            slots = self.tables[0, row][:, place // BLOCK].long() * BLOCK + place % BLOCK
            k, v = torch.randn(2, length, tables * self.heads, dim, generator=generator)
            TORCH.store(self.blocks, 1, slots, k, v + 0.3)
        self.q = torch.randn(200, 3 * tables * self.heads, dim, generator=generator).to(dtype)

    def run(self, lengths: list[int], rows: list[int], attend: bool = True) -> Tensor:
        """Chunks of the last tokens of rows."""
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
        last = torch.cat(
            [
                torch.arange(self.held[r] - n, self.held[r])
                for r, n in zip(rows, lengths, strict=True)
            ]
        )
        last = last.expand(1, self.tables.shape[2], -1).contiguous()
        q, (k, v) = self.q[: sum(lengths)], self.blocks.layer(1)
        if attend:
            chunks = CpuQuerySegments(torch.tensor(rows), starts, last)
            return paged_attention(q, k, v, self.tables, chunks, 0, SCALE)
        reference = QuerySegments(torch.tensor(rows), last[0], 208, starts)
        return paged_attention_torch(q, k, v, self.tables[0], reference, SCALE)


@pytest.mark.compiler
@thinned(
    {
        "name": list(FORMATS),
        "dtype": [torch.float32, torch.bfloat16],
        "dim": [16, 32, 48, 128],
    }
)
def test_attention_widens_levels(name: str, dtype: torch.dtype, dim: int) -> None:
    form = FORMATS[name]
    within = 1e-5 if dtype is torch.float32 else 1e-2
    for tables in (1, 2):
        rows = Rows(form, dim, dtype, tables)
        for lengths in ([1, 1, 1], [1, 1, 40], [130]):
            which = [0, 1, 2][: len(lengths)]
            found, expected = rows.run(lengths, which), rows.run(lengths, which, attend=False)
            torch.testing.assert_close(found, expected, atol=within, rtol=within)


@pytest.mark.compiler
@pytest.mark.parametrize("tokens", [1, 128])
def test_every_number_of_e4m3_is_read_as_it_is(tokens: int) -> None:
    """Of both heads, the second of which has negative ones: as values, and as keys one by one."""
    keys, values = Pool(FORMATS["fp8"], 128).blocks.layer(1)
    numbers = torch.arange(256, dtype=torch.uint8).view(2, 128)
    numbers[:, 127] = 0  # not a number
    expected = numbers.view(torch.float8_e4m3fn).float()
    one = torch.ones(()).to(torch.float8_e4m3fn).view(torch.uint8)
    for held in (keys, values):
        held.step[1] = 1.0
        held.levels[1] = 0
    tables = torch.ones(1, 1, 1, 1, dtype=torch.int32)
    starts = torch.tensor([0, tokens])

    def attend(query: Tensor, entries: int) -> Tensor:
        last = torch.full((1, 1, tokens), entries - 1)
        chunks = CpuQuerySegments(torch.tensor([0]), starts, last)
        return paged_attention(query, keys, values, tables, chunks, 0, 1.0).float()

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


@pytest.mark.compiler
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 48, 128])
def test_a_token_alone_and_in_a_chunk_is_the_same_to_the_last_bit(
    form: EntryFormat, dtype: torch.dtype, dim: int
) -> None:
    """Or its own entries, which are rounded, could go to another level."""
    rows = Rows(form, dim, dtype)
    together = rows.run([130], [0])
    q = rows.q
    for token in range(130):
        rows.held[0], rows.q = 200 - 129 + token, q[token:]
        assert torch.equal(rows.run([1], [0])[0], together[token])


@pytest.mark.compiler
def test_attention_refuses_what_it_was_not_built_for() -> None:
    rows = Rows(FORMATS["int8"], 16, torch.float32)
    k, v = rows.blocks.layer(1)
    chunks = CpuQuerySegments(torch.tensor([0]), torch.tensor([0, 1]), torch.zeros(1, 1, 1).long())
    with pytest.raises(ValueError, match="keys and values are not both levels"):
        paged_attention(rows.q[:1], k, v.widened(), rows.tables, chunks, 0, SCALE)
    fp8, _ = Rows(FORMATS["fp8"], 16, torch.float32).blocks.layer(1)
    with pytest.raises(ValueError, match=r"no keys of .* beside values of .*e4m3=True"):
        paged_attention(rows.q[:1], k, fp8, rows.tables, chunks, 0, SCALE)
