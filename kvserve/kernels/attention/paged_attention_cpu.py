"""Attention over paged blocks on a CPU: calls ``cpu/paged_attention.cpp``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvserve.entry_format import FORMATS
from kvserve.kernels.checks import check_codes, check_remainder, check_shares, check_sinks
from kvserve.kernels.coded_entries import Codes
from kvserve.kernels.cpu.build import defines_of
from kvserve.kernels.cpu.calls import Compiled
from kvserve.kernels.quantized_entries import QuantizedVectors
from kvserve.kernels.remainder import Remainder
from kvserve.kernels.shares import Shares

DTYPES = (torch.float32, torch.bfloat16)
HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 8, 256
_COMPILED = Compiled("paged_attention")
MAX_GROUPS = 8
_REFUSALS = {
    1: "chunk {} is of table row {}, which is not there",
    2: "chunk {} ends at token {}, which is not there",
    3: "chunk {} sees entry {}, which its tables do not hold",
    4: "chunk {} reads block {}, which is not one of the pool",
    5: "chunk {} refers to vector {}, which its codebook does not hold",
    6: "chunk {} turns a key by {} positions, more than a sequence has",
}


@dataclass(frozen=True, slots=True)
class CpuQuerySegments:
    """S runs of consecutive tokens, each of one table row; int64, on the CPU.

    ``rows [S]``; ``starts [S + 1]`` first tokens, and where the last run ends: tokens behind it are
    padding, and see nothing; ``last [LG, R, T]`` the last entry that each token sees of each of its
    tables, -1 for none; ``first [LG, R, T]`` the first one (``None``: entry 0).
    """

    rows: Tensor
    starts: Tensor
    last: Tensor
    first: Tensor | None = None


class Begun(NamedTuple):
    """Attention of T tokens to a part of what they see.

    ``out`` float32 [T, Hq, D]; ``log_sums`` float32 [T, Hq], logarithms of what each softmax
    divides by; ``shares`` float32 [T, Hq], what of it the newest entries got, if that is wanted.
    """

    out: Tensor
    log_sums: Tensor
    shares: Tensor | None


Entries = Tensor | QuantizedVectors


def _defines(keys: Entries, values: Entries) -> tuple[str, ...]:
    if isinstance(keys, Tensor) or isinstance(values, Tensor):
        return ()
    return defines_of(keys.form, values.form)


def instructions(library: ctypes.CDLL) -> str:
    """The vector instructions that a kernel was compiled with, as in ``AVX-512, BF16, VNNI``."""
    name = library.kvserve_instructions
    name.restype = ctypes.c_char_p
    return str(name(), "ascii")


def refusal(head_dim: int) -> str | None:
    """Why the kernel does not take heads of this size; ``None`` if it does."""
    if head_dim % HEAD_DIM_MULTIPLE == 0 and 0 < head_dim <= MAX_HEAD_DIM:
        return None
    return f"head_dim {head_dim} is not a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}"


def paged_attention(
    query: Tensor,
    keys: Entries,
    values: Entries,
    tables: Tensor,
    chunks: CpuQuerySegments,
    group: int,
    scale: float,
    codes: Codes | None = None,
    shares: Shares | None = None,
    remainder: Remainder | None = None,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
    begun: Begun | None = None,
    log_sums: Tensor | None = None,
) -> Tensor:
    """Attention of each token over its row's entries up to its ``last``, softmax at ``scale``.

    query: [T, Hq, D]; keys, values: [num_blocks, B, Hkv/R, D], or levels of them; tables: int32
    [LG, num_rows, R, M], of which layer group ``group`` is read; ``codes`` are that group's.
    Returns [T, Hq, D]; zeros where a token sees nothing. ``shares`` takes the logarithm of what
    each query gave to the newest entries, 0 for such a token. ``remainder [num_rows, Hkv, ...]`` is
    what tokens see beside entries, if they see any. ``sinks`` float32 [Hq] are logits that take
    part in each head's softmax and carry no value. Logits x become ``soft_cap`` tanh(x /
    ``soft_cap``), unless it is 0. ``begun`` is what tokens have seen of other entries, newer ones:
    their softmax is over both. ``log_sums`` takes those of ``Begun``, whose ``out`` is returned
    then. ``ValueError`` for shapes it is not built for, ``IndexError`` for a row, an entry, a block
    or a vector that is not there; no sequence holds block 0. Reference: ``paged_attention_torch``.
    """
    check_remainder(remainder, tables[0], query, keys)
    check_sinks(sinks, query)
    check_shares(shares, query)
    _check(query, keys, values, tables, chunks, codes)
    assert begun is None or (begun.shares is None) is (shares is None), "both have shares or none"
    out = torch.empty(query.shape, dtype=query.dtype if log_sums is None else torch.float32)
    num_rows, per_row, columns = tables.shape[1:]
    (k, *k_scales, k_groups), (v, *v_scales, v_groups) = _stored(keys), _stored(values)
    head_stride = 0 if k_groups == 0 else k.stride(2)
    coded: tuple[Tensor | None, ...] = (None,) * 6
    widths = 0, 0, 0, 0
    if codes is not None:
        slots, vectors, counts, slot_tables, vector_tables, turns = codes
        coded = counts, slots, vectors, slot_tables, vector_tables, turns
        widths = slots.shape[1], slot_tables.shape[2], vector_tables.shape[2], len(turns)
    _COMPILED(
        *(query, out, k, v, tables[group], chunks.rows, chunks.starts, chunks.last[group]),
        *(None if chunks.first is None else chunks.first[group], sinks),
        *(*(shares or (None,) * 2), log_sums, *(begun or (None,) * 3)),
        *(*(remainder or (None,) * 3), *coded, *k_scales, *v_scales),
        *(k_groups, v_groups, head_stride, *widths),
        *(query.stride(0), k.stride(0), len(query), len(chunks.rows), keys.shape[0], num_rows),
        *(columns, keys.shape[1], query.shape[1], keys.shape[2] * per_row, per_row),
        *(query.shape[2], torch.get_num_threads()),
        *(scale, soft_cap, query.dtype is torch.bfloat16),
        refused=_REFUSALS,
        defines=_defines(keys, values),
    )
    return out


def begin_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    chunks: CpuQuerySegments,
    group: int,
    scale: float,
    shares: Shares | None = None,
    soft_cap: float = 0.0,
) -> Begun:
    """Attention to these entries alone, which ``paged_attention`` goes on from. Sums are added up
    in one order for chunks of any length."""
    log_sums = torch.empty(query.shape[:2], dtype=torch.float32)
    how: dict[str, Any] = {"shares": shares, "soft_cap": soft_cap, "log_sums": log_sums}
    out = paged_attention(query, keys, values, tables, chunks, group, scale, **how)
    return Begun(out, log_sums, None if shares is None else shares.out)


def _stored(x: Entries) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """What attention reads: numbers or levels, steps, lows, and the number of steps."""
    if isinstance(x, Tensor):
        return x, None, None, 0
    return x.levels, x.step, x.low, x.step.shape[-1]


def _check(
    query: Tensor,
    keys: Entries,
    values: Entries,
    tables: Tensor,
    chunks: CpuQuerySegments,
    codes: Codes | None,
) -> None:
    """Raise ``ValueError`` unless the kernel's assumptions hold."""
    problem = _problem(query, keys, values, tables, chunks)
    if problem is not None:
        raise ValueError(
            f"paged attention: {problem} (query {list(query.shape)}, blocks {list(keys.shape)}, "
            f"tables {list(tables.shape)})"
        )
    if codes is not None:
        assert isinstance(keys, Tensor), "codes refer to vectors as they were computed"
        check_codes(codes, tables[0], keys)


def _problem(
    query: Tensor,
    keys: Entries,
    values: Entries,
    tables: Tensor,
    chunks: CpuQuerySegments,
) -> str | None:
    tokens, heads, dim = query.shape
    per_table = keys.shape[2]
    if (why := refusal(dim)) is not None:
        return why
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype}: one of {DTYPES} is needed"
    if keys.shape != values.shape or keys.shape[3] != dim or heads % (per_table * tables.shape[2]):
        return "query heads do not divide over the KV heads of the blocks and tables"
    if query.stride()[1:] != (dim, 1):
        return "a token of the query is not dense"
    if (why := _entry_problem(query, keys, values)) is not None:
        return why
    if tables.dtype is not torch.int32 or not tables.is_contiguous():
        return "tables are not dense int32"
    parts = [chunks.rows, chunks.starts, chunks.last]
    if chunks.first is not None:
        parts.append(chunks.first)
    if not all(part.dtype is torch.int64 and part.is_contiguous() for part in parts):
        return "chunks are not dense int64"
    if (
        any(x.shape != (tables.shape[0], tables.shape[2], tokens) for x in parts[2:])
        or len(chunks.starts) != len(chunks.rows) + 1
    ):
        return "chunks do not fit the query and the tables"
    return None


def _entry_problem(query: Tensor, keys: Entries, values: Entries) -> str | None:
    """What is wrong with keys and values, which are of one shape."""
    if isinstance(keys, Tensor) and isinstance(values, Tensor):
        if not query.dtype is keys.dtype is values.dtype:
            return f"dtypes {query.dtype}, {keys.dtype}, {values.dtype}: they have to be the same"
        if keys.stride()[1:] != (keys.shape[2] * keys.shape[3], keys.shape[3], 1):
            return "a layer of a block is not dense"
        return (
            None if keys.stride() == values.stride() else "keys and values are not laid out alike"
        )
    if isinstance(keys, Tensor) or isinstance(values, Tensor):
        return "keys and values are not both levels"
    forms = keys.form, values.form
    if not any(forms == (each.key, each.value) for each in FORMATS.values()):
        return f"no keys of {keys.form} beside values of {values.form}"
    if max(x.step.shape[-1] for x in (keys, values)) > MAX_GROUPS:
        return f"more than {MAX_GROUPS} groups of channels"
    if max(8 // form.bits for form in forms) > 1 and keys.shape[3] % 16:
        return f"head_dim {keys.shape[3]} is not a multiple of 16, as fewer than 8 bits need"
    return None
