"""The cases of bench/kernels.py: each kernel's work in a step and in an event of Kara."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvserve.engine.policies.selection import token_to_chunk_torch
from kvserve.kernels.attend.paged_attention import paged_attention_torch
from kvserve.kernels.attend.paged_attention_triton import paged_attention_triton
from kvserve.kernels.attend.query_segments import QuerySegments
from kvserve.kernels.dispatch import capability
from kvserve.kernels.move.move_kv import gather_kv_torch, gather_torch, move_kv_torch
from kvserve.kernels.move.move_kv_triton import gather_kv_triton, gather_triton, move_kv_triton
from kvserve.kernels.sample.sample_tokens import sample_tokens_torch
from kvserve.kernels.sample.sample_tokens_triton import sample_tokens_triton
from kvserve.kernels.score.token_to_chunk_triton import token_to_chunk_triton
from kvserve.kernels.score.window_scores import window_scores_torch
from kvserve.kernels.score.window_scores_triton import window_scores_triton
from kvserve.kernels.store.coded_entries import CODE_WORDS, Codes, Slots, turns_of
from kvserve.kernels.store.remainder import Remainder
from kvserve.kernels.store.slot_mapping import slot_mapping
from kvserve.kernels.store.store_kv import store_kv_torch
from kvserve.kernels.store.store_kv_triton import store_kv_triton
from kvserve.scheduler.layout import Granularity, KVLayout

# query heads, KV heads, head dim
SHAPES = {
    "llama-8b": (32, 8, 128),
    "qwen3-4b": (32, 8, 128),
    "qwen2.5-7b": (28, 4, 128),
    "smoke": (4, 2, 16),
}
GRAPH_ENTRIES = 8_442
VOCABULARY = {"llama-8b": 128_256, "qwen3-4b": 151_936, "qwen2.5-7b": 152_064, "smoke": 90}


@dataclass(frozen=True)
class Sizes:
    """``layers``: fewer than a model's, so that a large batch fits; attention and stores are timed
    on one. The other fields are the numbers of an event, Kara's defaults."""

    layers: int = 4
    block: int = 64
    window: int = 512
    kept: int = 144
    buffer: int = 32
    chunk_budget: int = 16
    max_chunk: int = 8


SMOKE = Sizes(layers=2, block=16, window=40, kept=12, buffer=8, chunk_budget=4)
"""What Triton's interpreter runs in seconds."""


@dataclass(frozen=True)
class Case:
    """A kernel's work: ``triton`` and ``torch`` give the same result from the same inputs.

    ``num_bytes`` and ``flops``: what it moves and computes. ``layers``: how many layers a call
    covers. Attention and stores run once per layer, an event's kernels once for all layers.
    """

    kernel: str
    triton: Callable[[], Tensor]
    torch: Callable[[], Tensor]
    num_bytes: int
    flops: int = 0
    layers: int = 1


@dataclass(frozen=True)
class Setting:
    """A model's shape in a layout, and ``rows`` sequences that hold ``context`` entries each."""

    shape: str
    granularity: Granularity
    context: int
    rows: int
    dtype: torch.dtype
    device: str
    sizes: Sizes = Sizes()

    @property
    def layout(self) -> KVLayout:
        _, kv_heads, dim = SHAPES[self.shape]
        return KVLayout(self.sizes.layers, kv_heads, dim, self.sizes.block, self.granularity)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def cache(self) -> tuple[Tensor, Tensor]:
        """A full cache, and block tables [LG, rows, R, M] in random order."""
        layout = self.layout
        columns = -(-self.context // self.sizes.block)
        count = self.rows * columns * layout.groups
        blocks = torch.randperm(count, device=self.device).int() + 1
        tables = blocks.view(layout.layer_groups, self.rows, layout.rows, columns)
        cache = torch.empty(layout.cache_shape(count + 1), dtype=self.dtype, device=self.device)
        return cache.normal_(), tables


def remainder_of(setting: Setting) -> Remainder:
    """What an engine always has beside its rows' entries; every third lane has none."""
    _, kv_heads, dim = SHAPES[setting.shape]
    lanes = setting.rows, kv_heads
    bias = torch.rand(lanes, device=setting.device) * 5
    nothing = torch.arange(bias.numel(), device=setting.device).view(lanes) % 3 == 0
    keys, values = torch.randn(2, *lanes, dim, device=setting.device)
    return Remainder(keys, values, bias.masked_fill(nothing, -torch.inf))


def cases(setting: Setting) -> Iterator[Case]:
    """The kernels' work in a step and in an event of Kara."""
    yield from step_cases(setting)
    yield from event_cases(setting)


def step_cases(setting: Setting) -> Iterator[Case]:
    """Attention, the store, and sampling."""
    cache, tables = setting.cache()
    yield from attention_cases(setting, cache, tables)
    if setting.granularity is Granularity.HEAD:
        yield coded_case(setting)
    yield store_case(setting, cache, tables)
    yield from sampling_cases(setting)


def beside_torch(case: Case) -> Iterator[Case]:
    """A case, and torch's version of it, which the engine could run as well."""
    yield case
    yield replace(case, kernel=f"{case.kernel} by torch", triton=case.torch)


def attention_cases(setting: Setting, cache: Tensor, tables: Tensor) -> Iterator[Case]:
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    keys, values = cache[:, 0, 0], cache[:, 0, 1]
    few = max(2, min(512, setting.context // 8))
    # A graph's decode is split for as many entries as a row of bench/gpu.py may have.
    captured = "decode in a graph", 1, max(setting.context, GRAPH_ENTRIES)
    for kernel, chunk, most in (
        ("decode", 1, setting.context),
        captured,
        ("prefill", few, setting.context),
    ):
        # A chunk for as many rows as make a batch of 2,048 tokens.
        rows = setting.rows if chunk == 1 else max(1, min(setting.rows, 2048 // chunk))
        own = torch.arange(rows, device=setting.device)
        q = setting.random(rows * chunk, q_heads, dim)
        last = torch.arange(chunk, device=setting.device).repeat(rows).int()
        last = (last + setting.context - chunk).expand(tables.shape[2], -1).contiguous()
        starts = None if chunk == 1 else torch.arange(rows + 1, device=setting.device) * chunk
        chunks = QuerySegments(own, last, most, starts, chunk)
        inputs = q, keys, values, tables[0], chunks, dim**-0.5
        read = 2 * rows * setting.context * kv_heads * dim + 2 * q.numel()
        left = remainder_of(setting)
        yield Case(
            kernel,
            partial(paged_attention_triton, *inputs, remainder=left),
            partial(paged_attention_torch, *inputs, remainder=left),
            read * q.itemsize,
            4 * q_heads * dim * rows * (chunk * setting.context - chunk * (chunk - 1) // 2),
        )


def coded_case(setting: Setting) -> Case:
    """Decoding over rows that are coded except for their newest block. A codebook has half as many
    vectors as the coded entries had keys and values."""
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    rows, device, block = setting.rows, setting.device, setting.sizes.block
    coded = (setting.context - 1) // block * block
    per_block = 2 * block * dim * setting.dtype.itemsize // (2 * CODE_WORDS)
    widths = -(-coded // per_block), -(-coded // (2 * block)), 1
    count = rows * kv_heads * sum(widths)
    blocks = torch.randperm(count, device=device).int() + 1
    index, book, raw = (
        part.contiguous() for part in blocks.view(rows, kv_heads, -1).split(widths, dim=2)
    )
    tables = torch.zeros(rows, kv_heads, coded // block + 1, dtype=torch.int32, device=device)
    tables[..., -1:] = raw
    cache = setting.random(count + 1, 2, block, 1, dim)
    slots = cache.view(count + 1, -1).view(torch.int16).view(count + 1, per_block, CODE_WORDS)
    shape = rows * kv_heads * widths[0], per_block
    refs = torch.randint(0, coded, (2, *shape), device=device)
    scales = torch.rand(2, *shape, device=device) + 0.5
    place = torch.randint(0, setting.context, (2, *shape), device=device)
    distance = place[0] - place[1]
    words = Slots(refs[0], refs[1], scales[0], scales[1], place[0], distance).packed()
    slots[index.flatten().long()] = words
    inv_freq = 1e4 ** -(torch.arange(0, dim, 2, device=device) / dim)
    codes = Codes(
        slots,
        cache.view(count + 1, 2 * block, dim),
        torch.full((rows, kv_heads), coded, device=device),
        index,
        book,
        turns_of(inv_freq, setting.context),
    )
    own, q = torch.arange(rows, device=device), setting.random(rows, q_heads, dim)
    last = torch.full((kv_heads, rows), setting.context - 1, dtype=torch.int32, device=device)
    inputs = (
        q,
        cache[:, 0],
        cache[:, 1],
        tables,
        QuerySegments(own, last, setting.context),
        dim**-0.5,
    )
    left = remainder_of(setting)
    vectors = (coded + 2 * (setting.context - coded)) * dim * q.itemsize
    return Case(
        "decode of codes",
        partial(paged_attention_triton, *inputs, codes=codes, remainder=left),
        partial(paged_attention_torch, *inputs, codes=codes, remainder=left),
        rows * kv_heads * (vectors + 2 * CODE_WORDS * coded) + 2 * q.numel() * q.itemsize,
        4 * q_heads * dim * rows * setting.context,
    )


def store_case(setting: Setting, cache: Tensor, tables: Tensor) -> Case:
    _, kv_heads, dim = SHAPES[setting.shape]
    key, value = (setting.random(setting.rows, kv_heads, dim) for _ in range(2))
    rows = torch.arange(setting.rows, device=setting.device)
    last = torch.full_like(rows, setting.context - 1).expand(1, setting.layout.rows, -1)
    slots = slot_mapping(tables[:1], rows, last, setting.sizes.block)[0]

    def store(kernel: Callable[..., None]) -> Tensor:
        kernel(cache, 0, slots, key, value)
        return cache

    num_bytes = 4 * key.numel() * key.itemsize
    return Case("store", partial(store, store_kv_triton), partial(store, store_kv_torch), num_bytes)


def sampling_cases(setting: Setting) -> Iterator[Case]:
    """A token for every row, sampled from peaked logits with and without filters."""
    rows, device = setting.rows, setting.device
    logits = torch.randn(rows, VOCABULARY[setting.shape], device=device) * 3
    seeds = torch.randint(2**63 - 1, (rows,), device=device)
    positions = torch.arange(rows, device=device)
    # Temperature, top_p, top_k, min_p. Filters read the logits twice before they are sampled.
    for kernel, row, reads in (
        ("sample", (0.7, 1.0, 0.0, 0.0), 1),
        ("filter and sample", (0.7, 0.95, 50.0, 0.01), 3),
    ):
        settings = torch.tensor(row, device=device).repeat(rows, 1)
        inputs = logits, settings, seeds, positions, reads > 1
        yield from beside_torch(
            Case(
                kernel,
                partial(sample_tokens_triton, *inputs),
                partial(sample_tokens_torch, *inputs),
                reads * logits.nbytes,
            )
        )


def event_cases(setting: Setting) -> Iterator[Case]:
    """An event of every row: gather a window's keys and queries, score, select, move entries."""
    layout, rows, sizes = setting.layout, setting.rows, setting.sizes
    if setting.context < sizes.window:
        return
    cache, tables = setting.cache()
    layers, size = sizes.layers, sizes.window
    _, kv_heads, dim = SHAPES[setting.shape]
    lanes, seen = (layout.num_layers, kv_heads), size - sizes.buffer
    start, device = setting.context - size, setting.device

    def slots(entries: Tensor) -> Tensor:
        owners = torch.arange(rows, device=device).repeat_interleave(entries.shape[-1])
        return slot_mapping(
            tables, owners, entries.expand(*lanes, rows, -1).flatten(2), sizes.block
        )

    window = slots(start + torch.arange(seen, device=device))
    entry = dim * cache.itemsize
    yield Case(
        "gather",
        partial(gather_kv_triton, cache, window),
        partial(gather_kv_torch, cache, window),
        2 * window.numel() * entry,
        layers=layers,
    )
    # One byte a number, as queries are logged on a GPU that has e4m3.
    log = cache.view(torch.uint8).view(len(cache), layout.layers_per_block, -1, cache.shape[4], dim)
    logged = torch.randint(
        log.shape[2], log.shape[2] * len(log), (*lanes, rows * size), device=device
    )
    yield Case(
        "gather queries",
        partial(gather_triton, log, logged),
        partial(gather_torch, log, logged),
        2 * logged.numel() * dim,
        layers=layers,
    )
    keys = gather_kv_torch(cache, window).unflatten(2, (rows, -1)).permute(2, 0, 1, 3, 4)
    query = setting.random(rows, *lanes, size, dim)
    logged_queries = {"window scores": query}
    if capability(query.device) >= (8, 9):
        logged_queries["window scores e4m3"] = query.to(torch.float8_e4m3fn)
    for kernel, queries in logged_queries.items():
        inputs = queries, keys, dim**-0.5
        yield Case(
            kernel,
            partial(window_scores_triton, *inputs),
            partial(window_scores_torch, *inputs),
            2 * (queries.nbytes + keys.nbytes),
            4 * rows * math.prod(lanes) * size * seen * dim,
            layers,
        )
    scores = torch.rand(rows, *lanes, seen, device=device)
    select = scores, sizes.kept, sizes.chunk_budget, sizes.max_chunk
    yield from beside_torch(
        Case(
            "select",
            partial(token_to_chunk_triton, *select),
            partial(token_to_chunk_torch, *select),
            scores.nbytes + scores.numel() // seen * sizes.kept * 8,
            layers=layers,
        )
    )
    kept = (
        torch.rand(*lanes, rows, seen, device=device).argsort(-1)[..., : sizes.kept].sort(-1).values
    )
    buffer = torch.arange(seen, size, device=device).expand(*lanes, rows, -1)
    src = slots(start + torch.cat([kept, buffer], dim=-1))
    dst = slots(start + torch.arange(sizes.kept + sizes.buffer, device=device))

    def compact(kernel: Callable[..., None], *runs: int) -> Tensor:
        kernel(cache, src, dst, *runs)
        return cache

    yield Case(
        "compact",
        partial(compact, move_kv_triton, rows),
        partial(compact, move_kv_torch),
        4 * src.numel() * entry,
        layers=layers,
    )
