"""Attention over paged blocks on a CPU: calls ``paged_attention.cpp``."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvserve.entry_format import FORMATS
from kvserve.kernels.attend.query_segments import QuerySegments, Shares, check_attention
from kvserve.kernels.build import USUAL_DIM, WIDE, defines_of
from kvserve.kernels.calls import Compiled
from kvserve.late import Late

if TYPE_CHECKING:
    from kvserve.kernels.attend.paged_attention import Newest, Rest
    from kvserve.kernels.store.coded_entries import Codes
    from kvserve.kernels.store.entries import AnyEntries, Entries
    from kvserve.kernels.store.remainder import Remainder

DTYPES = (torch.float32, torch.bfloat16)
HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 8, 512
_COMPILED = Compiled("paged_attention")
_NUMBERS = *[None] * 3, *[0] * 3, None, None, 0, 0
"""``AnyLevels.passed`` of what is no levels."""
_check_newest = Late("kernels.attend.paged_attention:check_newest")
_REFUSALS = {
    1: "chunk {} is of table row {}, which is not there",
    2: "chunk {} ends at token {}, which is not there",
    3: "chunk {} sees entry {}, which its tables do not hold",
    4: "chunk {} reads block {}, which is not one of the pool",
    5: "chunk {} refers to vector {}, which its codebook does not hold",
    6: "chunk {} turns a key by {} positions, more than a sequence has",
}


def instructions(library: ctypes.CDLL) -> str:
    """The vector instructions that a kernel was compiled with, as in ``AVX-512, BF16, VNNI``."""
    name = library.kvserve_instructions
    name.restype = ctypes.c_char_p
    return str(name(), "ascii")


def refusal(head_dim: int, levels: bool = False) -> str | None:
    """Why the kernel does not take heads of this size, or their ``levels``; ``None`` if it does."""
    most = USUAL_DIM if levels else MAX_HEAD_DIM
    if head_dim % HEAD_DIM_MULTIPLE == 0 and 0 < head_dim <= most:
        return None
    return f"head_dim {head_dim} is not a multiple of {HEAD_DIM_MULTIPLE} up to {most}"


def paged_attention_cpu(
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
    rest: Rest | None = None,
) -> Tensor:
    """As ``paged_attention_torch``. Chunks are int64 and have ``starts``; tokens behind the last
    chunk are padding, and see nothing. A call begins with what tokens see of the ``newest``
    entries, in one order for chunks of any length, and others go on from that.

    ``ValueError`` for shapes it is not built for, ``IndexError`` for a row, an entry, a block or a
    vector that is not there; no sequence holds block 0.
    """
    attend, begun = partial(_attend, q, scale=scale, soft_cap=soft_cap), None
    if newest is not None:
        _check_newest(newest, shares)
    for more in (newest, rest):
        if more is None:
            continue
        log_sums, own = torch.empty(q.shape[:2], dtype=torch.float32), None
        if shares is not None:
            recent = newest.recent if newest is more else None
            if recent is None:  # none of the rest is among the newest
                recent = torch.zeros_like(shares.recent)
            own = Shares(torch.empty_like(shares.out), recent)
        held = more.keys, more.values, more.tables, more.chunks
        out = attend(*held, shares=own, log_sums=log_sums, begun=begun)
        begun = out, log_sums, None if own is None else own.out
    return attend(keys, values, tables, chunks, codes, shares, remainder, sinks, begun=begun)


def _attend(
    q: Tensor,
    keys: AnyEntries,
    values: AnyEntries,
    tables: Tensor,
    chunks: QuerySegments,
    codes: Codes | None = None,
    shares: Shares | None = None,
    remainder: Remainder | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    soft_cap: float,
    begun: tuple[Tensor, Tensor, Tensor | None] | None = None,
    log_sums: Tensor | None = None,
) -> Tensor:
    """``begun``: attention of these tokens to other entries, newer ones, float32 [T, Hq, D]; the
    logarithms of what each softmax divided by, and what of it the newest got, float32 [T, Hq]. It
    is returned, and ``log_sums`` filled, if these are given."""
    problem = _problem(q, keys, values, chunks)
    check_attention(q, keys, values, tables, chunks, codes, shares, remainder, sinks, problem)
    out = torch.empty(q.shape, dtype=q.dtype if log_sums is None else torch.float32)
    num_rows, per_row, columns = tables.shape
    defines: tuple[str, ...] = WIDE[q.shape[2] > USUAL_DIM]
    held: tuple[Any, ...] = keys, values, *_NUMBERS
    if not isinstance(keys, Tensor) and not isinstance(values, Tensor):
        defines, held = defines_of(keys.form, values.form), keys.passed(values)
    coded: tuple[Tensor | None, ...] = (None,) * 6
    widths = 0, 0, 0, 0
    if codes is not None:
        slots, vectors, counts, slot_tables, vector_tables, turns = codes
        coded = counts, slots, vectors, slot_tables, vector_tables, turns
        widths = slots.shape[1], slot_tables.shape[2], vector_tables.shape[2], len(turns)
    _COMPILED(
        *(q, out, *held[:2], tables),
        *(chunks.rows, chunks.starts, chunks.last, chunks.first, chunks.always),
        *(sinks, *(shares or (None,) * 2), log_sums, *(begun or (None,) * 3)),
        *(*(remainder or (None,) * 3), *coded, *held[2:], *widths),
        *(q.stride(0), held[0].stride(0), len(q), len(chunks.rows), keys.shape[0], num_rows),
        *(columns, keys.shape[1], q.shape[1], keys.shape[2] * per_row, per_row),
        *(q.shape[2], torch.get_num_threads()),
        *(scale, soft_cap, q.dtype is torch.bfloat16),
        refused=_REFUSALS,
        defines=defines,
    )
    return out


def _problem(q: Tensor, keys: AnyEntries, values: AnyEntries, chunks: QuerySegments) -> str | None:
    """What this kernel asks for beside ``check_attention``."""
    dim = q.shape[2]
    if (why := refusal(dim, not isinstance(keys, Tensor))) is not None:
        return why
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype}: one of {DTYPES} is needed"
    if q.stride(1) != dim:
        return "a token of the query is not dense"
    parts = [chunks.rows, chunks.starts, chunks.last]
    if not all(x is not None and x.dtype is torch.int64 and x.is_contiguous() for x in parts):
        return "chunks are not dense int64"
    if isinstance(keys, Tensor) or isinstance(values, Tensor):
        entry = keys.shape[2] * dim, dim
        apart = isinstance(keys, Tensor) and keys.stride()[1:3] != entry
        return "a layer of a block is not dense" if apart else None
    forms = keys.form, values.form
    if keys.form.few and values.form.few:
        return None
    if not any(forms == (each.key, each.value) for each in FORMATS.values()):
        return f"no keys of {keys.form} beside values of {values.form}"
    if max(8 // form.bits for form in forms) > 1 and keys.shape[3] % 16:
        return f"head_dim {keys.shape[3]} is not a multiple of 16, as fewer than 8 bits need"
    return None
