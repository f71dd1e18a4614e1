"""Compile the Triton kernels as their launchers launch them, without a GPU, and read their costs.

    python -m tests.kernels.compile_kernels --arch 90 --name decode

prints JSON: by variant and architecture, registers per thread, bytes spilled per thread, shared
memory per program, and the warp instructions of each loop: for attention those that 32 entries
take, for products with levels those for 32 weights of each lane. ``--write`` makes it the installed
Triton's budget, of these variants and architectures. Not under TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvserve.entry_format import FORMATS
from kvserve.kernels import dispatch
from kvserve.kernels.attend.decode_inputs import (
    Chunks,
    DecodeInputs,
    RowTables,
    decode_inputs_triton,
)
from kvserve.kernels.attend.paged_attention_triton import paged_attention_triton
from kvserve.kernels.attend.query_segments import QuerySegments, Shares
from kvserve.kernels.layer import gated_delta_triton as delta
from kvserve.kernels.layer.elementwise_triton import (
    add_rms_norm_triton,
    quantize_rows_triton,
    rms_norm_triton,
    rotate_triton,
    silu_and_mul_triton,
)
from kvserve.kernels.layer.gated_delta import RowChunks
from kvserve.kernels.layer.weight_levels import LevelForm, Levels
from kvserve.kernels.layer.weight_levels_triton import (
    expert_linear_levels_triton,
    linear_levels_triton,
)
from kvserve.kernels.move.move_few_triton import gather_few_triton, move_few_triton
from kvserve.kernels.move.move_kv_triton import gather_kv_triton, gather_triton, move_kv_triton
from kvserve.kernels.move.move_levels_triton import gather_levels_triton, move_levels_triton
from kvserve.kernels.sample.sample_tokens_triton import sample_tokens_triton
from kvserve.kernels.score.centre_scores_triton import centre_scores_triton
from kvserve.kernels.score.seen import Seen
from kvserve.kernels.score.token_to_chunk_triton import token_to_chunk_triton
from kvserve.kernels.score.window_scores_triton import window_scores_triton
from kvserve.kernels.store.coded_entries import Codes
from kvserve.kernels.store.entries import Entries, FewLayer, Shaping
from kvserve.kernels.store.few_bits import FewBlocks
from kvserve.kernels.store.few_bits_triton import store_few_triton
from kvserve.kernels.store.int4_log import Int4Queries
from kvserve.kernels.store.int4_log_triton import gather_int4_triton, store_int4_triton
from kvserve.kernels.store.quantized_entries import QuantizedBlocks
from kvserve.kernels.store.quantized_entries_triton import store_levels_triton
from kvserve.kernels.store.remainder import Remainder
from kvserve.kernels.store.store_kv_triton import (
    rotate_and_store_triton,
    store_kv_triton,
    store_queries_triton,
)
from kvserve.kernels.store.turning_triton import turn_triton

BUDGET = Path(__file__).with_name("budget.json")
ARCHS = (80, 90, 100)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
BF16 = torch.bfloat16


def new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Shapes and strides alone: a cache of any size takes no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def slots(*shape: int) -> Tensor:
    return new(*shape, dtype=torch.int64)


def cache(
    heads: int = 8,
    dim: int = 128,
    layers: int = 32,
    dtype: torch.dtype = BF16,
    block: int = 64,
) -> Tensor:
    return new(4096, layers, 2, block, heads, dim, dtype=dtype)


def levels(form: str, heads: int = 8, dim: int = 128, block: int = 64) -> QuantizedBlocks:
    """The same cache of --kv-cache-dtype ``form``."""
    stored = FORMATS[form]
    pool = new(4096, 32, stored.block_bytes(block, dim, 1, heads), dtype=torch.uint8)
    return QuantizedBlocks(pool, stored, block, dim)


def few_levels(
    form: str, heads: int = 8, dim: int = 128, block: int = 64, *, shaped: bool = False
) -> FewBlocks:
    """Two layers in few bits."""
    stored, each = FORMATS[form], new(heads, dim, dtype=torch.float32)
    shaping = Shaping(each)
    if shaped:
        shaping = Shaping(each, new(heads, dim, dim, dtype=torch.float32), slots(heads, dim))
    size = heads * block * (stored.key.size(dim) + stored.value.size(dim))
    layers = tuple(FewLayer(stored.key, stored.value, at, shaping) for at in (0, size))
    return FewBlocks(new(4096, 2 * size, dtype=torch.uint8), layers, heads, block, dim)


def attend(
    group: int = 4,
    dim: int = 128,
    rows: int = 1,
    chunk: int = 1,
    splits: int = 1,
    dtype: torch.dtype = BF16,
    codes: bool = False,
    form: str | None = None,
    shares: bool = False,
    remainder: bool = False,
    window: bool = False,
    sinks: bool = False,
    always: bool = False,
    soft_cap: float = 0.0,
    block: int = 64,
) -> None:
    """8 KV heads in blocks of 64; 8 sequences, each with ``chunk`` new tokens. ``codes``: rows may
    hold some, of at most 32,768 tokens. ``form``: the cache's --kv-cache-dtype. ``shares``: what
    newest entries got is handed out too, for a log in 4 bits. ``remainder``: rows may have one, as
    an engine's always may. The rest is what some layers' attention has."""
    kv = cache(8 // rows, dim, dtype=dtype, block=block)[:, 1]
    q = new(8 * chunk, 8 * group, dim, dtype=dtype)
    tables, last = (new(*s, dtype=torch.int32) for s in ((256, rows, 512), (rows, 8 * chunk)))
    starts = None if chunk == 1 else slots(9)
    first = new(rows, 8 * chunk, dtype=torch.int32) if window else None
    early = first if always else None
    chunks = QuerySegments(slots(8), last, 32_768, starts, chunk, first, early)
    coded = None
    if codes:
        kv = new(4096, 2, 64, 1, dim, dtype=dtype)
        coded = Codes(
            new(4096, 8 * dim * dtype.itemsize, 8, dtype=torch.int16),
            new(4096, 128, dim, dtype=dtype),
            slots(256, rows),
            new(256, rows, 64, dtype=torch.int32),
            new(256, rows, 512, dtype=torch.int32),
            new(32_768, dim, dtype=torch.float32),
        )
    keys: Entries = kv[:, 0]
    values: Entries = kv[:, 1]
    if form is not None:
        made = few_levels if FORMATS[form].few else levels
        keys, values = made(form, 8 // rows, dim, block).layer(1)
    told = Shares(new(*q.shape[:2], dtype=torch.float32), slots(8 * chunk)) if shares else None
    left = None
    if remainder:
        vectors = new(256, 8, dim, dtype=torch.float32)
        left = Remainder(vectors, vectors, new(256, 8, dtype=torch.float32))
    more = new(8 * group, dtype=torch.float32) if sinks else None
    given = (q, keys, values, tables, chunks, 0.1, coded, told, left, more, soft_cap)
    paged_attention_triton(*given, num_splits=splits)


def score(
    heads: int = 8, dim: int = 128, aggregate: str = "sum", queries: torch.dtype = BF16
) -> None:
    q, k = new(2, 32, heads, 512, dim, dtype=queries), new(2, 32, 8, 480, dim)
    window_scores_triton(q, k, 0.1, aggregate)


def int4_queries(*shape: int) -> Int4Queries:
    """128 numbers a vector."""
    scales = new(*shape, 2, dtype=torch.float16)
    return Int4Queries(new(*shape, 64, dtype=torch.uint8), scales)


def score_int4() -> None:
    """Kara's default: all heads, absolute attention, 32 entries behind the window's."""
    seen = Seen(new(2, 32, 32, 512, dtype=torch.float32), 480, later=32)
    queries, keys = int4_queries(2, 32, 32, 512), new(2, 32, 8, 512, 128)
    window_scores_triton(queries, keys, 0.1, "sum_squares", "mean", seen)


def sample(vocab: int = 128_256, filtered: bool = True) -> None:
    settings = new(64, 4, dtype=torch.float32)
    logits = new(64, vocab, dtype=torch.float32)
    sample_tokens_triton(logits, settings, slots(64), slots(64), filtered)


def point(heads: int, dim: int, futures: int) -> None:
    """An event of TriAttention at its defaults, or with aggregation max."""
    vectors = new(2, 32, heads, futures, dim, dtype=torch.float32)
    spread = new(32, heads, dim // 2, dtype=torch.float32)
    centre_scores_triton(new(2, 32, 8, 2048, dim), vectors, spread)


def place(layers: int = 1, heads: int = 1, logs: bool = False, rows_of: int = 1) -> None:
    """64 tokens' inputs, for tables of each layer and head; ``rows_of`` tokens are of one row."""
    tables, log = (new(layers, 256, heads, n, dtype=torch.int32) for n in (512, 64))
    lanes = layers, heads, 64
    first, span, stride = (slots(256) for _ in range(3))
    rows = RowTables(
        *(tables, slots(layers, 256, heads), slots(256)), *(log, first, span, stride), 64, 512
    )
    by_token = slots(*lanes) if logs else None, slots(64) if logs else None
    chunks = None
    if rows_of > 1:
        chunks = Chunks(slots(64 // rows_of + 1), slots(64 // rows_of), slots(64))
    inputs = DecodeInputs(slots(64), slots(*lanes), slots(*lanes), *by_token, chunks)
    decode_inputs_triton(rows, inputs, slots())


def turn(layout: Tensor, rows: int, group: int) -> None:
    """64 tokens of 8 KV heads, whose projections lie behind each other."""
    dim = layout.shape[-1]
    qk, v = new(64, 8 * (group + 2), dim, dtype=layout.dtype).split([8 * (group + 1), 8], dim=1)
    cos, sin = (new(64, 1, dim, dtype=layout.dtype) for _ in range(2))
    rotate_and_store_triton(layout, 0, slots(rows, 64), qk, v, cos, sin)


def choose(count: int, keep: int) -> None:
    token_to_chunk_triton(new(2, 32, 8, count, dtype=torch.float32), keep, 16, 8)


def multiply(form: LevelForm, rows: int, experts: int | None = None, outputs: int = 28_672) -> None:
    """An 8B model's matrix, or an expert's of Qwen3's."""
    shape = (outputs, 4096) if experts is None else (experts, 1536, 2048)
    with torch.device("meta"):
        weight = Levels.empty(form, shape, shape[-1])
    x = new(rows, shape[-1])
    if experts is None:
        linear_levels_triton(x, weight)
    else:
        expert_linear_levels_triton(x, weight, new(experts, dtype=torch.int32))


def rule(longest: int) -> None:
    """64 chunks of a layer with states of Qwen 3.5 9B's shape: 16 heads of keys, 32 of values."""
    tokens, channels, chunks = 64 * longest, 8192, RowChunks(slots(64), slots(65), longest)
    x, ab = new(tokens, channels + 4096), new(tokens, 64)
    rates, states = (new(*s, dtype=torch.float32) for s in ((2, 32), (64, 32, 128, 128)))
    taps, tails = new(4, channels), new(64, channels, 3)
    mixed = delta.causal_convolution(x[:, :channels], taps, tails, chunks)
    read = delta.gated_delta_rule(mixed, ab[:, :32], ab[:, 32:], rates, states, chunks)
    delta.gated_norm(read, new(128), x[:, channels:], 1e-6)


def levels_variants(what: str, *forms: str) -> dict[str, Callable[[], object]]:
    """What is done to a cache of levels of each form; the first, int8, has no name of its own."""
    lanes, new_entries = slots(32, 8, 4096), new(64, 8, 128)
    calls: dict[str, Callable[[str], object]] = {
        "store": lambda form: store_levels_triton(
            levels(form), 3, slots(1, 64), new_entries, new_entries
        ),
        "gather": lambda form: gather_levels_triton(levels(form), lanes, None, BF16),
        "move": lambda form: move_levels_triton(levels(form), lanes, lanes, 8),
    }
    return {
        f"{what}_levels" + f"/{form}" * (form != "int8"): partial(calls[what], form)
        for form in forms
    }


def few_variants() -> dict[str, Callable[[], object]]:
    """What is done to a cache in few bits; the turn of 64 tokens' queries."""
    lanes, entries = slots(2, 8, 4096), new(64, 8, 128)
    found: dict[str, Callable[[], object]] = {"turn_heads": lambda: turn_triton(new(64, 32, 128))}
    for form in ("k4v4", "k3v3", "k2v2"):
        stored, shaped = few_levels(form), few_levels(form, shaped=True)
        found |= {
            f"store_few/{form}": partial(
                store_few_triton, stored, 1, slots(1, 64), entries, entries
            ),
            f"store_few/{form}_shaped": partial(
                store_few_triton, shaped, 1, slots(1, 64), entries, entries
            ),
            f"gather_few/{form}": partial(gather_few_triton, stored, [0, 1], lanes, BF16),
            f"move_few/{form}": partial(move_few_triton, stored, [0, 1], lanes, lanes, 8),
        }
    return found


def gather_values(form: str) -> None:
    gather_levels_triton(levels(form), slots(32, 8, 4096), None, BF16, values=True)


AWQ = LevelForm(4, 128, lowest=-8, offsets="zero")

FORMS = tuple(name for name, form in FORMATS.items() if not form.average)
"""Of --kv-cache-dtype; others have layers of several of these."""
BOTH: dict[str, dict[str, Any]] = {
    "": {},
    **{f"/{form}": {"form": form} for form in FORMS},
    **{f"/dim{dim}": {"dim": dim} for dim in (64, 256)},
    **{"/group7": {"group": 7}, "/head": {"rows": 8}, "/float32": {"dtype": torch.float32}},
    **{"/codes": {"rows": 8, "codes": True}, "/shares": {"shares": True}},
    "/remainder": {"remainder": True},
}
"""Attention of a token and of long chunks."""
DECODES = BOTH | {
    **{f"/{form}_remainder": {"form": form, "remainder": True} for form in FORMS},
    **{
        f"{name}_split": BOTH[name] | {"splits": 8}
        for name in ("/codes", "/k8v4", "/k4v4", "/shares")
    },
    # What an engine asks for under Kara: shares for its log, and remainders.
    **{
        f"/{form}_shares": {"form": form, "splits": 8, "shares": True, "remainder": True}
        for form in FORMS
    },
    **{f"/{form}_group7": {"form": form, "group": 7} for form in FORMS},
    **{f"/{form}_dim{dim}": {"form": form, "dim": dim} for form in FORMS for dim in (16, 64, 256)},
    **{
        f"/{form}_window": {"form": form, "group": 8, "dim": 64, "window": True, "sinks": True}
        for form in ("k8v4", "k4v4")
    },
    "/k8v4_always": {"form": "k8v4", "window": True, "always": True, "soft_cap": 50.0},
    "/k8v4_block16": {"form": "k8v4", "block": 16},
    "/k4v4_head": {"form": "k4v4", "rows": 8},
    **{f"/codes_dim{dim}": BOTH["/codes"] | {"dim": dim} for dim in (64, 256)},
    "/codes_float32": BOTH["/codes"] | {"dtype": torch.float32},
    **{"/split": {"splits": 8}, "/block16": {"block": 16}},
}

VARIANTS: dict[str, Callable[[], object]] = {
    "compact_kv": lambda: move_kv_triton(cache(), slots(32, 8, 4096), slots(32, 8, 4096), 8),
    "compact_kv/head": lambda: move_kv_triton(
        cache(1, 64, 1), slots(32, 8, 4096), slots(32, 8, 4096), 8
    ),
    "compact_kv/float32": lambda: move_kv_triton(
        cache(dtype=torch.float32), slots(32, 8, 512), slots(32, 8, 512)
    ),
    "store_kv": lambda: store_kv_triton(cache(), 3, slots(1, 64), new(64, 8, 128), new(64, 8, 128)),
    "store_kv/head": lambda: store_kv_triton(
        cache(1, 128, 1), 0, slots(8, 64), new(64, 8, 128), new(64, 8, 128)
    ),
    "store_queries": lambda: store_queries_triton(
        new(4096, 32, 256, 8, 128, dtype=torch.uint8),
        3,
        slots(1, 64),
        new(64, 32, 128),
    ),
    "store_queries/int4": lambda: store_int4_triton(
        int4_queries(4096, 32, 256, 32),
        3,
        slots(1, 64),
        new(64, 32, 128),
        new(64, 32, dtype=torch.float32),
    ),
    "rms_norm": lambda: rms_norm_triton(new(64, 4096), new(4096), 1e-5),
    "rms_norm/added": lambda: add_rms_norm_triton(new(64, 4096), new(64, 4096), new(4096), 1e-5),
    "rms_norm/heads": lambda: rms_norm_triton(new(64, 48, 128)[:, :32], new(128), 1e-5),
    "rotate": lambda: rotate_triton(new(64, 48, 128)[:, :40], new(64, 1, 128), new(64, 1, 128)),
    "rotate_and_store": lambda: turn(cache(), 1, 4),
    "rotate_and_store/head": lambda: turn(cache(1, 64, 1), 8, 8),
    "silu_and_mul": lambda: silu_and_mul_triton(new(64, 28672)),
    "quantize_rows": lambda: quantize_rows_triton(new(64, 4096)),
    "quantize_rows/wide": lambda: quantize_rows_triton(new(64, 14336)),
    "gather_keys": lambda: gather_kv_triton(cache(), slots(32, 8, 4096)),
    "gather_queries/e4m3": lambda: gather_triton(
        new(4096, 32, 256, 8, 128, dtype=torch.uint8), slots(32, 8, 4096)
    ),
    "gather_queries/int4": lambda: gather_int4_triton(
        int4_queries(4096, 32, 256, 32), slots(32, 32, 4096)
    ),
    **{f"decode{name}": partial(attend, **how) for name, how in DECODES.items()},
    **{f"prefill{name}": partial(attend, chunk=512, **how) for name, how in BOTH.items()},
    "decode/remainder_split": lambda: attend(splits=8, shares=True, remainder=True),
    # gpt-oss's layers with windows and without, and Gemma 2's.
    "decode/window": lambda: attend(group=8, dim=64, window=True, sinks=True),
    "decode/window_split": lambda: attend(group=8, dim=64, window=True, sinks=True, splits=8),
    "decode/sinks": lambda: attend(group=8, dim=64, sinks=True),
    "decode/capped": lambda: attend(group=2, dim=256, soft_cap=50.0),
    "prefill/window": lambda: attend(chunk=512, group=8, dim=64, window=True, sinks=True),
    "decode/few": lambda: attend(chunk=4),
    "decode/many": lambda: attend(chunk=16),
    "decode/float16": lambda: attend(dtype=torch.float16),
    # The newest entries beside k4v4, 16 of which a block of it holds, and each row's first one.
    "decode/newest": lambda: attend(
        splits=2, shares=True, remainder=True, window=True, always=True, block=16
    ),
    "prefill/newest": lambda: attend(
        chunk=512, splits=2, remainder=True, window=True, always=True, block=16
    ),
    **levels_variants("store", "int8", "k8v4", "fp8"),
    **levels_variants("gather", "int8", "fp8"),
    "gather_levels/int4": partial(gather_values, "k8v4"),
    **levels_variants("move", "int8", "k8v4"),
    **few_variants(),
    "prefill/split": lambda: attend(chunk=512, splits=4),
    "window_scores": score,
    "window_scores/heads": lambda: score(heads=32),
    "window_scores/max": lambda: score(heads=32, aggregate="max"),
    "window_scores/squares": lambda: score(aggregate="sum_squares"),
    "window_scores/dim64": lambda: score(dim=64),
    "window_scores/e4m3": lambda: score(queries=torch.float8_e4m3fn),
    "window_scores/int4": score_int4,
    "window_scores/float32_queries": lambda: score(queries=torch.float32),
    "centre_scores": lambda: point(32, 128, 1),
    "centre_scores/max": lambda: point(16, 64, 17),
    "decode_inputs": lambda: place(logs=True),
    "decode_inputs/plain": place,
    "decode_inputs/chunks": lambda: place(logs=True, rows_of=4),
    "decode_inputs/head": lambda: place(32, 8, logs=True),
    "multiply_levels": lambda: multiply(AWQ, 1, outputs=4096),
    "widen_levels": lambda: multiply(AWQ, 2048),
    "widen_levels/Q8_0": lambda: multiply(LevelForm(8, 32), 2048),
    **{f"multiply_levels/rows{n}": partial(multiply, AWQ, n) for n in (1, 32, 64, 128)},
    "multiply_levels/rows64_few": lambda: multiply(AWQ, 64, outputs=4096),
    "multiply_levels/experts": lambda: multiply(AWQ, 512, experts=128),
    "multiply_levels/Q4_1": lambda: multiply(LevelForm(4, 32, offsets="minimum"), 128),
    "multiply_levels/Q8_0": lambda: multiply(LevelForm(8, 32), 128),
    "multiply_levels/FP8": lambda: multiply(LevelForm(8, 4096, torch.float32, e4m3=True), 128),
    "delta_rule/steps": lambda: rule(1),
    "delta_rule/pieces": lambda: rule(512),
    "sigmoid_gate": lambda: delta.sigmoid_gate(new(64, 4096), new(64, 8192)[:, 4096:]),
    "token_to_chunk": lambda: choose(480, 144),
    "token_to_chunk/longest": lambda: choose(4096, 1000),
    "sample_tokens": sample,
    "sample_tokens/unfiltered": lambda: sample(filtered=False),
    "sample_tokens/odd_vocabulary": lambda: sample(vocab=151_669),
}


SPILLING = {
    80: ("decode/few", "decode/many", "prefill/dim256", "delta_rule/pieces"),
    90: ("decode/remainder_split", "decode/codes_split", "decode/k8v4_split", "prefill/int8"),
    100: (
        *("prefill/dim64", "prefill/float32", "prefill/window", "prefill/newest"),
        *("decode/newest", "multiply_levels/FP8"),
    ),
}
"""Variants that spill 8 to 32 bytes under one of the Tritons; ``prefill/newest`` spills 104, and
``delta_rule/pieces`` 408."""


def is_budgeted(name: str, arch: int) -> bool:
    """e4m3 came with sm_89; reading codes or levels spills 8 to 16 bytes but on sm_90."""
    if name in SPILLING.get(arch, ()):
        return False
    levels = tuple(f"{kind}/{form}" for kind in ("decode", "prefill") for form in FORMS)
    if "codes" in name or name.startswith(levels):
        return arch == 90
    e4m3 = "window_scores/e4m3", "quantize_rows", "prefill/fp8", "gather_levels/fp8"
    return arch >= 89 or not name.startswith(e4m3)


class Compiler:
    """Compiles for one architecture what is launched meanwhile; ``costs`` and ``ptx`` by kernel."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.costs: dict[str, dict[str, int]] = {}
        self.ptx: dict[str, str] = {}

    def run(self, variant: Callable[[], object]) -> None:
        def launch(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
            self.compile(kernel, args, options)

        generation = divmod(self.arch, 10)
        with (
            patch.object(dispatch.Kernel, "launch", launch),
            patch.object(dispatch, "capability", lambda _: generation),
        ):
            variant()

    def compile(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        names = "num_warps", "num_stages", "maxnreg", "enable_fp_fusion"
        warps = {key: options.pop(key) for key in names if key in options}
        source = kernel.compiler
        values = dict(zip(source.arg_names, args, strict=False)) | options
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for i, name in enumerate(source.arg_names):
            value = values[name]
            signature[name], multiple = type_of(name, value, name in options)
            if signature[name] == "constexpr":
                constants[(i,)] = value
            if multiple:
                attributes[(i,)] = [["tt.divisibility", 16]]
        compiled = triton.compile(
            ASTSource(fn=source, signature=signature, constexprs=constants, attrs=attributes),
            target=GPUTarget("cuda", self.arch, 32),
            options=warps,
        )
        name = kernel.source.__name__.lstrip("_")
        self.ptx[name] = compiled.asm["ptx"]
        cubin = compiled.asm["cubin"]
        self.costs[name] = {**usage(cubin), "shared": compiled.metadata.shared}
        if name in ("attend", "decode_levels", "multiply_levels"):
            share = 32 * warps["num_warps"] / options.get("TILE", 1)
            if name == "multiply_levels":  # for 32 weights of each lane
                share = 1024 * warps["num_warps"] / (options["COLUMNS"] * options["INNER"])
            for i, length in enumerate(hot_loops(cubin), 1):
                self.costs[name][f"loop {i}"] = round(length * share)


def type_of(name: str, value: Any, constant: bool) -> tuple[str, bool]:
    """What Triton's launcher makes of an argument, and whether 16 divides it (or its address)."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype], name not in dispatch.UNALIGNED
    varying = name in dispatch.VARYING
    if constant or (value == 1 and not varying):
        return "constexpr", False
    if isinstance(value, float):
        return "fp32", False
    if value is None:
        return "constexpr", False
    return "i64" if value >= 2**31 else "i32", value % 16 == 0 and not varying


def told_by(tool: str, option: str, cubin: bytes) -> str:
    """What one of the assembler's own tools says of a compiled kernel."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def usage(cubin: bytes) -> dict[str, int]:
    """Registers and spilled bytes of each thread."""
    text = told_by("cuobjdump", "--dump-resource-usage", cubin)
    found = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


def hot_loops(cubin: bytes) -> list[int]:
    """Instructions of a pass of each loop that multiplies matrices, in the order of the code."""
    labels: dict[str, int] = {}
    code: list[str] = []
    loops = []
    for line in map(str.strip, told_by("nvdisasm", "-c", cubin).splitlines()):
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"^/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
            back = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instruction[1])
            if back and back[1] in labels:  # a label that was seen lies before
                body = code[labels[back[1]] :]
                if any("MMA" in each for each in body):
                    loops.append(len(body))
    return loops


def as_lines(budget: dict[str, Any]) -> str:
    """JSON with a line for each version, variant and kernel."""
    versions = []
    for version, costs in budget.items():
        lines = (f"  {json.dumps(name)}: {json.dumps(archs)}" for name, archs in costs.items())
        versions.append(f" {json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(versions) + "\n}"


def updated(budget: dict[str, Any], costs: dict[str, Any]) -> dict[str, Any]:
    """``budget`` with ``costs`` in place of what it had for these variants and architectures."""
    return budget | {name: budget.get(name, {}) | archs for name, archs in costs.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="compile the Triton kernels without a GPU")
    parser.add_argument("--arch", type=int, nargs="+", choices=(*ARCHS, 120), default=ARCHS)
    parser.add_argument("--name", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--ptx", type=Path, metavar="DIR", help="write each kernel's assembly")
    parser.add_argument("--write", action="store_true", help=f"write {BUDGET.name}")
    args = parser.parse_args()
    costs: dict[str, dict[str, dict[str, int]]] = {}
    for name in args.name:
        for arch in args.arch:
            if not is_budgeted(name, arch):
                continue
            compiler = Compiler(arch)
            compiler.run(VARIANTS[name])
            for kernel, cost in compiler.costs.items():
                costs.setdefault(f"{name}:{kernel}", {})[f"sm_{arch}"] = cost
                if args.ptx:
                    file = f"{name.replace('/', '-')}-{kernel}-sm_{arch}.ptx"
                    (args.ptx / file).write_text(compiler.ptx[kernel])
    if args.write:
        budget = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
        if args.name != list(VARIANTS) or args.arch != ARCHS:
            costs = updated(budget[triton.__version__], costs)
        BUDGET.write_text(as_lines(budget | {triton.__version__: costs}) + "\n")
    sys.stdout.write(json.dumps(costs) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
