"""Cases of --kv-cache-dtype: attention over levels, and what is stored, gathered and moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from bench.kernel_rows.cases import SHAPES, Case, Setting, remainder_of
from kvserve.entry_format import FORMATS, EntryFormat, few
from kvserve.kernels.attend.paged_attention import Newest, paged_attention_torch
from kvserve.kernels.attend.paged_attention_triton import paged_attention_triton
from kvserve.kernels.attend.query_segments import QuerySegments, Shares
from kvserve.kernels.dispatch import capability
from kvserve.kernels.storage import TORCH, TRITON, StorageKernels
from kvserve.kernels.store.entries import FewLayer, Shaping
from kvserve.kernels.store.few_bits import FewBlocks
from kvserve.kernels.store.quantized_entries import QuantizedBlocks
from kvserve.kernels.store.slot_mapping import slot_mapping
from kvserve.scheduler.layout import Granularity

FORMS = [form for form in FORMATS.values() if not form.average]
"""Others have layers of several of these, and of ``UNEQUAL``."""
UNEQUAL = [
    EntryFormat(f"k{key}v{value}", few(key), few(value), FORMATS["3bit"].newest)
    for key, value in permutations((2, 3, 4), 2)
]


def is_read(form: EntryFormat, device: str) -> bool:
    """Whether the device can."""
    return not form.key.e4m3 or capability(torch.device(device)) >= (8, 9)


def level_decodes(setting: Setting) -> Iterator[Case]:
    """Decoding over a cache of each form, whose time is to be seen beside numbers'."""
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    _, tables = setting.cache()
    left, entries = remainder_of(setting), setting.rows * setting.context
    for form in FORMS:
        if not is_read(form, setting.device):
            continue
        blocks = level_blocks(setting, form, tables).blocks
        q, chunks = chunks_of(setting, 1)
        chunks, newest = beside_newest(setting, form, chunks)
        inputs = q, *blocks.layer(0), tables[0], chunks, dim**-0.5
        beside: dict[str, Any] = {"remainder": left, "newest": newest}
        yield Case(
            f"decode of {form.name}",
            partial(paged_attention_triton, *inputs, **beside),
            partial(paged_attention_torch, *inputs, **beside),
            entries * kv_heads * form.entry_bytes(dim) + 2 * q.nbytes,
            4 * q_heads * dim * entries,
        )


def level_cases(form: EntryFormat, setting: Setting) -> Iterator[Case]:
    """A cache of levels: stored, attended to, gathered, moved."""
    _, kv_heads, _ = SHAPES[setting.shape]
    if not is_read(form, setting.device) or setting.dtype is torch.float16:  # compiled anew
        return
    _, tables = setting.cache()
    filled = level_blocks(setting, form, tables)
    blocks, key, value = filled.blocks, filled.key, filled.value
    lanes = filled.slots.expand(kv_heads, -1)[None]
    for kind, chunk, parts in kinds_of(setting):
        yield from attention_over(setting, form, filled, tables, kind, chunk, parts)

    def store(kernels: StorageKernels) -> Tensor:
        filled.store(kernels, value, key)
        return blocks.pool.int()

    def gather(kernels: StorageKernels) -> Tensor:
        return filled.gather(kernels, lanes, setting.dtype)

    def move(kernels: StorageKernels) -> Tensor:
        filled.move(kernels, lanes[..., 3:], lanes[..., :-3])
        return blocks.pool.int()

    for kernel, run in (("gather", gather), ("store", store), ("move", move)):
        yield pair_of(f"{kernel} of {form.name}", run, TRITON, TORCH, key.numel())
    if form.few:
        means = shaping_of(setting).mean
        for what, mean in (("keys", means), ("values", None)):
            given = (key, mean)
            turned = partial(TRITON.few.turn, *given), partial(TORCH.few.turn, *given)
            yield Case(f"turn of {what} of {form.name}", *turned, 2 * key.nbytes)


def unequal_cases(setting: Setting) -> Iterator[Case]:
    """Attention in layers whose keys have other bits than their values."""
    if setting.granularity is not Granularity.MODEL or setting.dtype is torch.float16:
        return
    _, tables = setting.cache()
    for form in UNEQUAL:
        filled = level_blocks(setting, form, tables)
        for kind, chunk in (("decode", 1), ("prefill", 5)):
            yield from attention_over(setting, form, filled, tables, kind, chunk, None)


@dataclass(frozen=True)
class Filled:
    """A cache of levels whose first layer is full: slots [R, T] of its entries, keys and values."""

    blocks: QuantizedBlocks | FewBlocks
    slots: Tensor
    key: Tensor
    value: Tensor

    def store(self, kernels: StorageKernels, key: Tensor, value: Tensor) -> None:
        if isinstance(self.blocks, FewBlocks):
            kernels.few.store(self.blocks, 0, self.slots, key, value)
        else:
            kernels.store_levels(self.blocks, 0, self.slots, key, value)

    def gather(self, kernels: StorageKernels, lanes: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys, then values."""
        if isinstance(self.blocks, FewBlocks):
            of = partial(kernels.few.gather, self.blocks, [0], lanes, dtype)
        else:
            of = partial(kernels.gather_levels, self.blocks, lanes, None, dtype)
        return torch.cat([of(values) for values in (False, True)])

    def move(self, kernels: StorageKernels, src: Tensor, dst: Tensor) -> None:
        if isinstance(self.blocks, FewBlocks):
            kernels.few.move(self.blocks, [0], src, dst, 1)
        else:
            kernels.move_levels(self.blocks, src, dst, 1)


def level_blocks(setting: Setting, form: EntryFormat, tables: Tensor) -> Filled:
    layout = setting.layout
    _, kv_heads, dim = SHAPES[setting.shape]
    lane = form.block_bytes(layout.block_size, dim, 1, layout.heads_per_block)
    count = tables.numel() + 1
    blocks: QuantizedBlocks | FewBlocks
    if form.few:
        pool = torch.zeros(count, lane, dtype=torch.uint8, device=setting.device)
        layers = (FewLayer(form.key, form.value, 0, shaping_of(setting)),)
        blocks = FewBlocks(pool, layers, layout.heads_per_block, layout.block_size, dim)
    else:
        shape = count, layout.layers_per_block, lane
        pool = torch.zeros(shape, dtype=torch.uint8, device=setting.device)
        blocks = QuantizedBlocks(pool, form, layout.block_size, dim)
    rows = torch.arange(setting.rows, device=setting.device).repeat_interleave(setting.context)
    place = torch.arange(setting.context, device=setting.device).repeat(setting.rows)
    at = place.expand(1, layout.rows, -1)
    slots = slot_mapping(tables[:1], rows, at, layout.block_size)[0]
    key, value = (setting.random(len(rows), kv_heads, dim) for _ in range(2))
    filled = Filled(blocks, slots, key, value)
    filled.store(TRITON if setting.device == "cuda" else TORCH, key, value)
    return filled


def shaping_of(setting: Setting) -> Shaping:
    """As a model's table has it: channels in any order, and small feedback."""
    _, heads, dim = SHAPES[setting.shape]
    with torch.device(setting.device):
        feedback = torch.randn(heads, dim, dim).tril(-1) * dim**-0.5 / 4 + torch.eye(dim)
        order = torch.rand(heads, dim).argsort(-1)
        return Shaping(torch.randn(heads, dim), feedback, order)


def beside_newest(
    setting: Setting, form: EntryFormat, chunks: QuerySegments
) -> tuple[QuerySegments, Newest | None]:
    """What tokens see of levels, and of the newest entries and the first one as an engine holds
    these for the form: as they were computed, in blocks of as many bytes; half of a short context
    at most."""
    layout = setting.layout
    if not form.newest:
        return chunks, None
    size = form.newest_tokens(layout.block_size, layout.head_dim, setting.dtype.itemsize)
    window = min(form.newest, setting.context // 2)
    columns = -(-setting.context // size)
    count = setting.rows * layout.rows * columns
    blocks = torch.randperm(count, device=setting.device).int() + 1
    shape = 2, count + 1, size, layout.heads_per_block, layout.head_dim
    first = chunks.last // window * window
    early = torch.ones_like(first)
    own = chunks._replace(first=first, always=early, max_held=window + chunks.max_chunk)
    table = blocks.view(setting.rows, layout.rows, columns)
    keys, values = setting.random(*shape)
    return chunks._replace(last=first - 1, first=early), Newest(keys, values, table, own)


def chunks_of(setting: Setting, chunk: int) -> tuple[Tensor, QuerySegments]:
    """Queries of the newest ``chunk`` tokens of every row."""
    q_heads, _, dim = SHAPES[setting.shape]
    device, rows, context = setting.device, setting.rows, setting.context
    last = torch.arange(context - chunk, context, device=device).repeat(rows).int()
    starts = None if chunk == 1 else torch.arange(rows + 1, device=device) * chunk
    last = last.expand(setting.layout.rows, -1).contiguous()
    chunks = QuerySegments(torch.arange(rows, device=device), last, context, starts, chunk)
    return setting.random(rows * chunk, q_heads, dim), chunks


def kinds_of(setting: Setting) -> Iterator[tuple[str, int, int | None]]:
    """Names of attention, tokens of a chunk, and parts of a context (``None``: as an engine does).

    For one shape and layout these are all tiles that an engine takes, in one part and in three.
    """
    yield "decode", 1, None
    yield "prefill", 5, None
    wide = setting.shape == "llama-8b" and setting.granularity is Granularity.MODEL
    if wide and setting.dtype is torch.bfloat16:
        for chunk in (1, 3, 5, 9, 40):
            for parts in (1, 3):
                yield f"{chunk} tokens in {parts} parts", chunk, parts


def attention_over(
    setting: Setting,
    form: EntryFormat,
    filled: Filled,
    tables: Tensor,
    kind: str,
    chunk: int,
    parts: int | None,
) -> Iterator[Case]:
    """Attention of one kind to a cache of levels."""
    q, chunks = chunks_of(setting, chunk)
    chunks, newest = beside_newest(setting, form, chunks)
    inputs = q, *filled.blocks.layer(0), tables[0], chunks, q.shape[-1] ** -0.5
    size = 2 * filled.key.numel()
    yield from attention_cases(setting, f"{kind} of {form.name}", inputs, parts, size, newest)


def attention_cases(
    setting: Setting,
    kernel: str,
    inputs: tuple[Any, ...],
    parts: int | None,
    num_bytes: int,
    newest: Newest | None = None,
) -> Iterator[Case]:
    """Attention, and beside it the shares that a log in 4 bits takes; in named parts without, too:
    so the prompts' part of a step has it, and other logs."""
    left = remainder_of(setting)
    q = inputs[0]
    recent = torch.arange(len(q), device=q.device) % 7 + 1
    told = Shares(torch.empty(q.shape[:2], device=q.device), recent)
    if newest is not None:
        own = newest.chunks
        assert own.first is not None
        newest = newest._replace(recent=recent)
        told = told._replace(recent=recent - (own.last - own.first + 1)[0])

    def attend(kernel: Callable[..., Tensor]) -> Tensor:
        out = kernel(*inputs, shares=told, remainder=left, newest=newest)
        return torch.cat([out, told.out[..., None].to(out.dtype)], dim=-1)

    def alone(kernel: Callable[..., Tensor]) -> Tensor:
        return kernel(*inputs, remainder=left, newest=newest)

    triton = partial(paged_attention_triton, num_splits=parts)
    yield pair_of(kernel, attend, triton, paged_attention_torch, num_bytes)
    if parts is not None:
        name = f"{kernel}, entries alone"
        yield pair_of(name, alone, triton, paged_attention_torch, num_bytes)


def pair_of(
    kernel: str,
    run: Callable[..., Tensor],
    triton: object,
    reference: object,
    num_bytes: int,
) -> Case:
    return Case(kernel, partial(run, triton), partial(run, reference), num_bytes)
