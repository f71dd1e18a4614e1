"""Attention of new tokens over paged entries: decode, chunks, and queries that see less than all.

P chunks of consecutive tokens have R block tables each: one for all KV heads, or one for every KV
head. Each token has a last entry that it sees: in a causal chunk these rise by one, and a strided
observation pass may set any. Decoding is chunks of one token. The first entries of a table may be
held as codes (``coded_entries.py``): they are decoded tile by tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvserve.kernels.attend.attend_triton import attend, merge
from kvserve.kernels.attend.decode_levels_triton import decode_levels
from kvserve.kernels.attend.paged_attention import Newest, check_newest
from kvserve.kernels.attend.query_segments import QuerySegments, Shares, check_attention
from kvserve.kernels.checks import HEAD_DIMS
from kvserve.kernels.dispatch import Tile, interprets, num_processors, tile_of
from kvserve.kernels.store.coded_entries import Codes
from kvserve.kernels.store.entries import Entries, told_of
from kvserve.kernels.store.remainder import Remainder

_MAX_SPLITS = 64
_MAX_LONG_SPLITS = 4  # most of these parts have no entries, and end at once


class _Parts(NamedTuple):
    """What is left of each part of a context: weighted means [P, T, Hq, D], and [P, T, Hq]
    logarithms of weights, and of those of the newest entries."""

    means: Tensor
    sums: Tensor
    recent: Tensor | None

    def some(self, which: slice) -> _Parts:
        return _Parts(*(None if x is None else x[which] for x in self))  # type: ignore[arg-type]


def paged_attention_triton(
    q: Tensor,
    keys: Entries,
    values: Entries,
    tables: Tensor,
    chunks: QuerySegments,
    scale: float,
    codes: Codes | None = None,
    shares: Shares | None = None,
    remainder: Remainder | None = None,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
    newest: Newest | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """As ``paged_attention_torch``; entries in blocks outside of the cache are not seen, and
    neither are codes with wrong references.

    Levels are widened as they are loaded. Query heads of a KV head share its loads. The context is
    split if there are few rows, and for long rows among many. ``num_splits`` (default: from
    ``_splits``) follows from shapes and ``max_held`` alone, so a captured graph stays valid while
    lengths grow up to it. A launch of its own adds the parts up: on an H100 that takes 6 to 16 %
    less than when the last program of a row does it. ``newest`` entries are one more part.
    """
    problem = None if q.shape[2] in HEAD_DIMS else f"head_dim is not one of {HEAD_DIMS}"
    check_attention(q, keys, values, tables, chunks, codes, shares, remainder, sinks, problem)
    if newest is not None:
        check_newest(newest, shares)
    packed = chunks.max_chunk * (q.shape[1] // (tables.shape[1] * keys.shape[2]))
    tile = _tile_of(q, keys, chunks, packed, codes is not None)
    least = 1
    if num_splits is None:
        programs = len(chunks.rows) * tables.shape[1] * keys.shape[2] * -(-packed // tile.rows)
        num_splits, least = _splits(programs, chunks.max_held, tile, q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    count, parts, behind = num_splits + (newest is not None), None, None
    if count > 1:
        means = q.new_empty(count, *q.shape, dtype=torch.float32)
        sums = q.new_empty(count, *q.shape[:2], dtype=torch.float32)
        parts = behind = _Parts(means, sums, None if shares is None else torch.empty_like(sums))
    beside = remainder, sinks
    if newest is not None:
        assert parts is not None
        own, recent = newest[:4], newest.recent
        given = None if shares is None or recent is None else Shares(shares.out, recent)
        check_attention(q, *own, None, given, remainder)
        cut, front = _tile_of(q, *own[::3], packed, False), parts.some(slice(1))
        _attend(out, front, q, *own, scale, None, given, *beside, soft_cap, cut, 1, 1)
        behind, beside = parts.some(slice(1, None)), (None, None)
    context = keys, values, tables, chunks, scale, codes, shares
    _attend(out, behind, q, *context, *beside, soft_cap, tile, num_splits, least)
    if parts is not None:
        places, told = q.shape[0] * q.shape[1], out if shares is None else shares.out
        merge.launch(
            (places,),
            *(out, parts.means, parts.sums, out if shares is None else parts.recent, told),
            *(places, count),
            DIM=q.shape[2],
            SPAN=1 << (count - 1).bit_length(),
            SHARES=shares is not None,
            num_warps=4,
        )
    return out


def _attend(
    out: Tensor,
    parts: _Parts | None,
    q: Tensor,
    keys: Entries,
    values: Entries,
    tables: Tensor,
    chunks: QuerySegments,
    scale: float,
    codes: Codes | None,
    shares: Shares | None,
    remainder: Remainder | None,
    sinks: Tensor | None,
    soft_cap: float,
    tile: Tile,
    num_splits: int,
    least: int,
) -> None:
    """Attend to a context in ``num_splits`` parts; without ``parts`` it is whole."""
    rows, last, _, starts, max_chunk, first, always = chunks
    assert always is None or codes is None, "no row with codes has entries of both kinds"
    tokens, heads, dim = q.shape
    _, per_row, columns = tables.shape
    num_blocks, block, kv_heads, _ = keys.shape
    group = heads // (per_row * kv_heads)
    k, v = told_of(keys), told_of(values)
    # Where nothing is read or written, any address does.
    given, recent = (last, rows) if shares is None else shares
    written = out, given, *(tables if x is None else x for x in parts or (None,) * 3)
    lost = (tables,) * 3 if remainder is None else remainder
    shown = [tables if x is None else x for x in (first, always, sinks)]
    scales = scale * math.log2(math.e), soft_cap * math.log2(math.e)
    constants = {
        "ROWS": per_row,
        "HEADS": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "BLOCK": block,
        "QUERIES": tile.rows,
        "TILE": tile.columns,
        "SPLIT": parts is not None,
        "SHARES": shares is not None,
        "REMAINDER": remainder is not None,
        "WINDOW": first is not None,
        "ALWAYS": first is not None and always is not None,
        "SINKS": sinks is not None,
        "CAPPED": soft_cap > 0,
        "KEYS": k.form,
        "KEY_WIDTH": k.width,
        "VALUES": v.form,
        "VALUE_WIDTH": v.width,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    lanes = len(rows) * per_row * kv_heads
    if _decodes_levels(q, keys, chunks):
        decode_levels.launch(
            (lanes, -(-group // tile.rows), num_splits),
            *(*written, q, k.stored, v.stored, k.steps, v.steps, v.lows, tables, rows, last),
            *(*shown, recent, *lost, *scales, k.log, v.log, tokens, least, columns, num_blocks),
            *(*q.stride()[:2], k.strides[0], k.strides[2]),
            VALUE_ROWS=v.numbers,
            STRIDE=k.strides[1],
            ASM=not interprets(),
            **constants,
        )
        return
    attend.launch(
        (lanes, -(-max_chunk * group // tile.rows), num_splits),
        *(*written, q, k.stored, v.stored, k.steps, v.steps, v.lows, tables, rows, last),
        *(*shown, rows if starts is None else starts, recent, *lost),
        *(*_code_arguments(codes, tables), *scales, k.log, v.log, tokens, least),
        *(columns, num_blocks, *q.stride()[:2], *k.strides, v.strides[1]),
        CHUNKED=starts is not None,
        SLOTS=0 if codes is None else codes.slots.shape[1],
        **constants,
    )


def _decodes_levels(q: Tensor, keys: Entries, chunks: QuerySegments) -> bool:
    """Whether ``decode_levels`` takes these: each tile in a block. It rounds queries and weights,
    to 16 bits and to float16; numbers of float32 are multiplied as they are."""
    rounds = not isinstance(keys, Tensor) and q.dtype is not torch.float32
    return rounds and chunks.starts is None and keys.shape[1] % 16 == 0


def _tile_of(q: Tensor, keys: Entries, chunks: QuerySegments, packed: int, coded: bool) -> Tile:
    """The tile for ``packed`` queries of a KV head and chunk."""
    block, queries = keys.shape[1], 1 << (packed - 1).bit_length()
    if _decodes_levels(q, keys, chunks):
        tile = tile_of("decode levels", q.device, q.shape[2], q.dtype)
        columns = min(tile.columns, block & -block)
        return tile._replace(rows=min(tile.rows, max(4, queries)), columns=columns)
    # Decoding codes takes registers, so these kernels have tiles of their own. 64 queries in
    # float32 do not fit into registers.
    decodes = packed <= (32 if q.dtype is torch.float32 else 64)
    kernel = ("decode" if decodes else "prefill") + " codes" * coded
    tile = tile_of(kernel, q.device, q.shape[2], q.dtype)
    if decodes:
        queries = max(tile.rows, queries)
        halves = isinstance(keys, Tensor) and q.dtype is not torch.float32 and not coded
        if halves and queries == 16 and block & -block == 16 and tile.columns > 16:
            # A tile lies in one block, and its warp waits for no other.
            return tile._replace(columns=16, warps=1, programs=2 * tile.programs)
        return tile._replace(rows=queries, warps=max(tile.warps, min(4, queries // 8)))
    if isinstance(keys, Tensor):
        return tile
    fewer = 1 + keys.form.few  # widening takes registers
    return tile._replace(rows=tile.rows // 2, columns=max(16, tile.columns // fewer))


def _code_arguments(codes: Codes | None, unused: Tensor) -> tuple[Tensor | int, ...]:
    """What the kernel reads of codes; a slot is four words of 32 bits there."""
    if codes is None:
        return *[unused] * 6, 0, 0, 0
    slots, vectors, coded, slot_tables, vector_tables, turns = codes
    widths = slot_tables.shape[2], vector_tables.shape[2], len(turns)
    return slots.view(torch.int32), vectors, coded, slot_tables, vector_tables, turns, *widths


def _splits(programs: int, max_held: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Parts of a context, and the fewest entries of a part.

    Few rows are split until every multiprocessor has ``tile.programs``, into parts of four tiles or
    more. If there are enough rows, only those that hold more than ``tile.longest`` are split.
    """
    fill = tile.programs * num_processors(device) // max(1, programs)
    fill = max(1, min(fill, max_held // (4 * tile.columns), _MAX_SPLITS))
    if fill > 1 or not tile.longest:
        return fill, 4 * tile.columns
    return max(1, min(-(-max_held // tile.longest), _MAX_LONG_SPLITS)), tile.longest
