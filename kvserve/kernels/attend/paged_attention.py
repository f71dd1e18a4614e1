"""Attention over paged entries, written down: the reference of both kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvserve.kernels.attend.query_segments import QuerySegments, Shares
from kvserve.kernels.store.coded_entries import Codes, read_codes
from kvserve.kernels.store.entries import AnyEntries, AnyLevels, Entries
from kvserve.kernels.store.remainder import Remainder, capped


class Newest(NamedTuple):
    """Entries that tokens see beside others, at least their own, held as they were computed:
    ``keys``, ``values``, ``tables`` and ``chunks`` as those of the others. ``recent`` is as of
    ``Shares``, and counts both; those of the others are then what is left of it, or less."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    chunks: QuerySegments
    recent: Tensor | None = None


class Rest(NamedTuple):
    """What events of a row did not keep, older than all other entries that tokens see: ``keys``,
    ``values`` [num_blocks, B, Hkv, D], ``tables`` and ``chunks`` as those of the others."""

    keys: AnyLevels
    values: AnyLevels
    tables: Tensor
    chunks: QuerySegments


def check_newest(newest: Newest, shares: Shares | None) -> None:
    """``ValueError`` if shares are asked for that ``newest`` entries say nothing of."""
    if shares is not None and newest.recent is None:
        raise ValueError("paged attention: shares need recent of the newest entries, too")


def paged_attention_torch(
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
    """The reference, in float32: every token gathers all entries of its rows.

    q: [T, Hq, D] -> [T, Hq, D]; a token that sees nothing gets 0. keys, values: [num_blocks, B, Hb,
    D], strided, or levels of them; tables: int32 [num_rows, R, M] with R * Hb KV heads. If entries
    are held as ``codes`` (Hb = 1), it does not matter which blocks the tables name for them.
    ``shares`` takes the logarithm of what each query gave to its newest entries, 0 for a token that
    sees nothing. ``remainder [num_rows, R * Hb, ...]`` is one more entry of each row, for tokens
    that see any. ``sinks`` float32 [Hq] are one more logit of each head, without a value. Logits x
    become ``soft_cap`` tanh(x / ``soft_cap``), unless it is 0. ``newest`` are further entries that
    tokens see, and so are the ``rest``, which are older than all others.
    """
    rows = chunks.rows
    if chunks.starts is not None:
        rows = rows.repeat_interleave(chunks.starts.diff())
    k, v, seen, early = _gathered(keys, values, tables, rows, chunks, codes)
    recent = None if shares is None else shares.recent
    if newest is not None:
        more = _gathered(newest.keys, newest.values, newest.tables, rows, newest.chunks)
        k, v = (
            torch.cat([x.float(), y.float()], dim=4) for x, y in zip((k, v), more, strict=False)
        )
        seen, early = (torch.cat([seen, more[2]], dim=-1), torch.cat([early, more[3]], dim=-1))
        recent = newest.recent
    if rest is not None:
        more = _gathered(rest.keys, rest.values, rest.tables, rows, rest.chunks)
        k, v = (torch.cat([y.float(), x.float()], 4) for x, y in zip((k, v), more, strict=False))
        seen, early = (torch.cat([y, x], -1) for x, y in zip((seen, early), more[2:], strict=True))
    tokens, per_token = seen.shape[:2]
    folded = q.float().view(tokens, per_token, k.shape[2], -1, 1, q.shape[-1])
    logits = capped((folded @ k.float().transpose(-1, -2) * scale).squeeze(-2), soft_cap)
    # How many are newer than each: than those that are seen ``always``, all the others.
    others = seen & ~early
    later = others.sum(dim=-1, keepdim=True) - torch.where(early, 0, others.cumsum(dim=-1))
    later += torch.where(early, early.sum(dim=-1, keepdim=True) - early.cumsum(dim=-1), 0)
    any_seen = seen.any(dim=-1)
    seen = seen[:, :, None, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    # What is not seen may hold anything, and 0 * nan is nan.
    v = v.float().masked_fill(~seen[..., None], 0.0)
    if remainder is not None:
        lost = Remainder(*(x.unflatten(1, (per_token, -1)) for x in remainder.at(rows)))
        bias = torch.where(any_seen[..., None], lost.bias, -torch.inf)
        more_keys, more_values = lost.numbers()
        first = (folded.squeeze(-2) @ more_keys[..., None]).squeeze(-1) * scale
        first = capped(first, soft_cap)
        logits = torch.cat([logits, (first + bias[..., None])[..., None]], dim=-1)
        v = torch.cat([v, more_values[..., None, None, :]], dim=-2)
    if sinks is not None:
        column = sinks.float().view(per_token, k.shape[2], -1).expand(logits.shape[:-1])
        column = column.masked_fill(~any_seen[..., None, None], -torch.inf)
        logits = torch.cat([logits, column[..., None]], dim=-1)
        v = torch.cat([v, torch.zeros_like(v[..., :1, :])], dim=-2)
    if shares is not None and recent is not None:
        beside = logits.shape[-1] - later.shape[-1]  # never among the newest
        older = F.pad(later >= recent[:, None, None], (0, beside), value=True)
        newer = logits.masked_fill(older[:, :, None, None], -torch.inf).logsumexp(dim=-1)
        share = (newer - logits.logsumexp(dim=-1)).nan_to_num(0.0, neginf=-torch.inf)
        shares.out.copy_(share.flatten(1))
    probs = torch.softmax(logits, dim=-1).nan_to_num(0.0)
    return (probs[..., None, :] @ v).view(q.shape).to(q.dtype)


def _gathered(
    keys: AnyEntries,
    values: AnyEntries,
    tables: Tensor,
    rows: Tensor,
    chunks: QuerySegments,
    codes: Codes | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All entries of each token's row, [T, R, Hb, 1, M * B, D] twice, which of them it sees, [T, R,
    M * B], and which of these because they are seen ``always``."""
    own = tables[rows].long()
    # [T, R, M * B, Hb, D] -> [T, R, Hb, 1, M * B, D]
    k, v = (_numbers(x[own]).flatten(2, 3).transpose(2, 3)[:, :, :, None] for x in (keys, values))
    place = torch.arange(k.shape[4], device=k.device)
    if codes is not None:
        at = (place < codes.coded[rows][..., None]).nonzero(as_tuple=True)
        coded = read_codes(codes, rows[at[0]] * own.shape[1] + at[1], at[2])
        for x, entries in zip((k, v), coded, strict=True):
            x[at[0], at[1], 0, 0, at[2]] = entries.to(x.dtype)
    seen = place <= chunks.last.T[..., None]
    early = torch.zeros_like(seen)
    if chunks.first is not None:
        shown = place >= chunks.first.T[..., None]
        if chunks.always is not None:
            early = seen & ~shown & (place < chunks.always.T[..., None])
        seen &= shown
    return k, v, seen | early, early


def _numbers(x: AnyEntries) -> Tensor:
    return x if isinstance(x, Tensor) else x.widened()
