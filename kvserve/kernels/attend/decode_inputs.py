"""Where the next tokens of the first rows go, and what they see: a captured step's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.kernels.build import why_missing
from kvserve.kernels.calls import Compiled
from kvserve.kernels.store.slot_mapping import slot_mapping
from kvserve.late import Late

_COMPILED = Compiled("decode_inputs")


@dataclass(frozen=True, slots=True, eq=False)
class RowTables:
    """The rows' tables and lengths, at addresses that never change.

    block_tables, log_tables: int32 [LG, rows, R, M], each with columns of its own; kv_lens: int64
    [LG, rows, R], entries; num_computed: int64 [rows], tokens. Windows whose queries are logged
    begin ``log_span`` tokens apart, the first at ``log_from``; of every ``log_stride`` tokens from
    there on the last one's queries are logged: all int64 [rows].
    """

    block_tables: Tensor
    kv_lens: Tensor
    num_computed: Tensor
    log_tables: Tensor
    log_from: Tensor
    log_span: Tensor
    log_stride: Tensor
    block_tokens: int
    log_block_tokens: int

    def slots(self, rows: Tensor, entries: Tensor) -> Tensor:
        """Slots of ``entries [LG, R, T]`` of ``rows [T]``."""
        return slot_mapping(self.block_tables, rows, entries, self.block_tokens)

    def query_slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Log slots of queries: [LG, R, T]; the null block for queries that no event needs."""
        groups, _, heads, _ = self.log_tables.shape
        first, stride = self.log_from[rows], self.log_stride[rows]
        behind = positions - first
        lanes = (first // stride + behind // stride).expand(groups, heads, -1)
        slots = slot_mapping(self.log_tables, rows, lanes, self.log_block_tokens)
        return torch.where((behind >= 0) & (behind % stride == stride - 1), slots, 0)

    def recent(self, rows: Tensor, positions: Tensor) -> Tensor:
        """How many of a token's newest entries, its own included, are in its window: [T]."""
        return (positions - self.log_from[rows]).clamp(min=0) % self.log_span[rows] + 1


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Consecutive tokens of each of the first n rows, all int64: those of row i begin at ``starts
    [n + 1]``, and its first ``lengths [n]`` are real; ``rows [T]`` says whose each token is."""

    starts: Tensor
    lengths: Tensor
    rows: Tensor

    @property
    def real(self) -> Tensor:
        """Which tokens are: bool [T]."""
        places = torch.arange(len(self.rows), device=self.rows.device)
        return places - self.starts[self.rows] < self.lengths[self.rows]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """Buffers for one token of each of the first T rows, or for T tokens in ``chunks``: positions,
    recent: int64 [T]; slots, last (the newest entry that it sees), query_slots: int64 [LG, R, T].
    The two of queries that are not logged are ``None``."""

    positions: Tensor
    slots: Tensor
    last: Tensor
    query_slots: Tensor | None = None
    recent: Tensor | None = None
    chunks: Chunks | None = None


FillInputs = Callable[[RowTables, DecodeInputs, Tensor], None]
"""``decode_inputs``, or another that does the same."""
decode_inputs_triton: FillInputs = Late("kernels.attend.decode_inputs_triton:decode_inputs_triton")


def decode_inputs(rows: RowTables, inputs: DecodeInputs, count: Tensor) -> None:
    """Fill ``inputs`` for the first ``count []`` rows, then count their new entries and tokens.

    The other rows keep their lengths. Their tokens are at position 0, see nothing and go to the
    null block: those rows may be of sequences that the step skips. So do tokens that are not real.
    """
    fill = decode_inputs_triton if rows.block_tables.is_cuda else decode_inputs_torch
    fill(rows, inputs, count)


def decode_inputs_torch(rows: RowTables, inputs: DecodeInputs, count: Tensor) -> None:
    """The reference of ``decode_inputs``."""
    size, chunks = len(inputs.positions), inputs.chunks
    places = torch.arange(size, device=count.device)
    added = real = (places if chunks is None else chunks.rows) < count
    offset = 0 * places
    if chunks is not None:
        places, offset = chunks.rows, places - chunks.starts[chunks.rows]
        real = real & chunks.real
        first = torch.arange(len(chunks.lengths), device=count.device) < count
        added = torch.where(first, chunks.lengths, 0)
    positions = torch.where(real, rows.num_computed[places] + offset, 0)
    entries = torch.where(real, rows.kv_lens[:, places].transpose(1, 2) + offset, 0)
    inputs.positions.copy_(positions)
    inputs.slots.copy_(torch.where(real, rows.slots(places, entries), 0))
    inputs.last.copy_(torch.where(real, entries, -1))
    if inputs.query_slots is not None:
        inputs.query_slots.copy_(torch.where(real, rows.query_slots(places, positions), 0))
    if inputs.recent is not None:
        inputs.recent.copy_(rows.recent(places, positions))
    rows.kv_lens[:, : len(added)] += added[:, None]
    rows.num_computed[: len(added)] += added


def decode_inputs_cpu(rows: RowTables, inputs: DecodeInputs, count: Tensor) -> None:
    """One loop over the rows."""
    check(rows, inputs)
    groups, num_rows, heads, columns = rows.block_tables.shape
    chunks, tokens = inputs.chunks, len(inputs.positions)
    of_chunks = (None, None) if chunks is None else (chunks.starts, chunks.lengths)
    _COMPILED(
        *(rows.block_tables, rows.log_tables, rows.log_from, rows.log_span, rows.log_stride),
        *(rows.kv_lens, rows.num_computed, count, *of_chunks),
        *(inputs.positions, inputs.slots, inputs.last, inputs.query_slots, inputs.recent),
        *(groups, num_rows, heads, tokens, tokens if chunks is None else len(chunks.lengths)),
        *(columns, rows.log_tables.shape[3], rows.block_tokens, rows.log_block_tokens),
    )


def select_decode_inputs() -> FillInputs:
    """The compiled form for a CPU, or torch's if there is no compiler."""
    return decode_inputs_cpu if why_missing("decode_inputs") is None else decode_inputs_torch


def check(rows: RowTables, inputs: DecodeInputs) -> None:
    """``ValueError`` unless the assumptions of the kernels hold."""
    lanes, tokens = rows.kv_lens.shape, len(inputs.positions)
    by_row = rows.num_computed, rows.log_from, rows.log_span, rows.log_stride
    by_lane = [x for x in (inputs.slots, inputs.last, inputs.query_slots) if x is not None]
    by_token = [x for x in (inputs.positions, inputs.recent) if x is not None]
    tables, count = (rows.block_tables, rows.log_tables), tokens
    chunked: tuple[Tensor, ...] = ()
    if inputs.chunks is not None:
        chunked = inputs.chunks.starts, inputs.chunks.lengths, inputs.chunks.rows
        count = len(inputs.chunks.lengths)
    fits = count <= lanes[1] and (inputs.query_slots is None) == (inputs.recent is None)
    fits &= not chunked or [len(x) for x in chunked] == [count + 1, count, tokens]
    fits &= all(x.shape[:3] == lanes for x in tables) and all(len(x) == lanes[1] for x in by_row)
    fits &= all(x.shape == (lanes[0], lanes[2], tokens) for x in by_lane)
    fits &= all(x.dtype is torch.int32 for x in tables)
    dense = *tables, rows.kv_lens, *by_row, *by_lane, *by_token, *chunked
    if not fits or not all(x.is_contiguous() for x in dense):
        raise ValueError(
            f"decode_inputs: tables {list(rows.block_tables.shape)}, log tables "
            f"{list(rows.log_tables.shape)} and slots {list(inputs.slots.shape)}: contiguous "
            "tensors that fit them are needed"
        )
