"""What a forward needs to know of its batch, and the interface of attention backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from kvserve.engine.device.transfer import to_device
from kvserve.kernels.attend.query_segments import Shares
from kvserve.kernels.store.remainder import Remainder
from kvserve.scheduler.arrays import IntArray

if TYPE_CHECKING:
    from kvserve.kernels.store.coded_entries import Codes
    from kvserve.kernels.store.entries import AnyLevels, Entries


class RowRemainders(Protocol):
    """What stands for the entries that rows have lost, at addresses that never change."""

    used: bool
    """Whether any row may have had one yet."""

    def layer(self, layer: int) -> Remainder:
        """``[num_rows, Hkv, ...]`` of one layer."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens in S chunks of one table row each; decoding chunks, of one token, come first.

    On the device: ``positions [T]`` are logical (RoPE), ``prompt_lens [T]`` the prompt length of
    each token's sequence (dynamic RoPE); ``slots [LG, R, T]`` are where new entries go (empty: none
    are stored); ``query_slots [LG, R, T]`` where queries are logged (block 0 takes the rest), or
    ``None``. Token t sees entries 0 to ``last [LG, R, T]`` of its row in ``tables [LG, num_rows,
    R, M]``.

    On the host: ``rows [S]`` of the tables; ``starts [S + 1]``, the chunks' first tokens and T;
    ``columns [S]``, the blocks in use by each chunk's row (the longest of its groups); ``causal``,
    whether every token of a chunk sees one entry more than the token before it.

    ``codes``, by layer group, are what all ``num_rows`` hold as codes. ``recent [T]`` counts the
    newest entries whose share of attention is logged with a token's queries, at least one.
    ``remainders`` are what tokens see beside entries. ``further``, each ``[LG, R, T]``, are where
    other cache groups write what they hold of the tokens.

    Tokens see entries from ``first [LG, R, T]`` on (``None``: all up to the last) and those before
    ``always [LG, R, T]`` (``None``: none of these), so that a chunk sees at most ``most_seen`` from
    the first on (``None``: all in its columns). ``windowed`` are the same
    tokens over the tables of layers with sliding windows, if the model has any. ``newest`` are the
    same tokens over the tables of further entries that they see, held as they were computed (if any
    are: ``LayerCache.newest_keys_values``); ``rest`` the same over what their row's events did not
    keep. ``block_tokens``: how many entries a block holds,
    unless it is the layout's number.
    """

    positions: Tensor
    prompt_lens: Tensor
    slots: Tensor
    query_slots: Tensor | None
    last: Tensor
    tables: Tensor
    rows: IntArray
    starts: IntArray
    columns: IntArray
    causal: bool = True
    codes: tuple[Codes, ...] | None = None
    recent: Tensor | None = None
    remainders: RowRemainders | None = None
    further: tuple[Tensor, ...] = ()
    first: Tensor | None = None
    always: Tensor | None = None
    most_seen: int | None = None
    windowed: ForwardBatch | None = None
    newest: ForwardBatch | None = None
    rest: ForwardBatch | None = None
    block_tokens: int | None = None

    @property
    def num_decoding(self) -> int:
        """How many leading chunks have one token."""
        longer = np.diff(self.starts) > 1
        return int(longer.argmax()) if longer.any() else len(self.rows)

    def part(self, first: int, end: int) -> ForwardBatch:
        """The chunks ``[first, end)`` alone, for attention: their entries are stored already."""
        tokens = slice(int(self.starts[first]), int(self.starts[end]))
        return replace(
            self,
            positions=self.positions[tokens],
            prompt_lens=self.prompt_lens[tokens],
            slots=self.slots[..., :0],
            query_slots=None,
            further=(),
            last=self.last[..., tokens],
            first=None if self.first is None else self.first[..., tokens],
            always=None if self.always is None else self.always[..., tokens],
            rows=self.rows[first:end],
            starts=self.starts[first : end + 1] - self.starts[first],
            columns=self.columns[first:end],
            recent=None if self.recent is None else self.recent[tokens],
            newest=None if self.newest is None else self.newest.part(first, end),
            rest=None if self.rest is None else self.rest.part(first, end),
        )

    def by_token(self) -> ForwardBatch:
        """The same with one token per chunk, for backends that support only causal chunks."""
        lengths = np.diff(self.starts)
        return replace(
            self,
            rows=self.rows.repeat(lengths),
            starts=np.arange(self.starts[-1] + 1),
            columns=self.columns.repeat(lengths),
            causal=True,
        )

    def chunk_rows(self) -> tuple[Tensor, Tensor]:
        """For every causal chunk (rows have one table): its row's blocks, and the entries it sees.

        int32 ``[LG, S, columns]`` and ``[LG, S]``, on the device.
        """
        device = self.tables.device
        ends = to_device(self.starts[1:] - 1, device)
        used = self.tables[:, :, 0, : int(self.columns.max())]
        tables = used.index_select(1, to_device(self.rows, device))
        return tables, (self.last[:, 0].index_select(1, ends) + 1).int()


def wanted_shares(out: Tensor | None, recent: Tensor | None) -> Shares | None:
    """What a kernel has to write if shares are logged; else ``None``."""
    if out is None:
        return None
    assert recent is not None, "a batch that logs shares says of how many entries"
    return Shares(out, recent)


RotateAndStore = Callable[[int, ForwardBatch, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes a layer's new entries as ``LayerCache.store``, but keys behind queries, not rotated: qk [T,
Hq + Hkv, D], v [T, Hkv, D], cos and sin [T, 1, D]. Returns rotated queries [T, Hq, D]."""


class LayerCache(Protocol):
    """What a layer needs of a cache. ``KVCache`` stores what it is given; other caches may not."""

    logs_shares: bool
    """Whether each query is logged with the share of its attention that newest entries got."""

    @property
    def rotate_and_store(self) -> RotateAndStore | None:
        """Spares ``store`` and the rotation before it a launch; ``None``: it takes rotated keys."""
        ...

    def store(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        """Take one layer's new entries, before it attends. k, v: [T, Hkv, D]."""
        ...

    def turn(self, x: Tensor) -> Tensor:
        """Queries [T, Hq, D] as entries are held, or what attention reads of these turned back."""
        ...

    def log(self, layer: int, batch: ForwardBatch, q: Tensor, shares: Tensor | None) -> None:
        """Take the layer's queries, after it has attended. q: [T, Hq, D]; shares: float32 [T, Hq]
        if they are logged."""
        ...

    def keys_values(self, layer: int) -> tuple[Entries, Entries, int]:
        """Blocks of one layer, ``[num_blocks, B, Hkv/R, D]`` twice, and its layer group."""
        ...

    def newest_keys_values(self, layer: int) -> tuple[Tensor, Tensor, int]:
        """The same of entries that ``ForwardBatch.newest`` sees: numbers as they were computed."""
        ...

    def rest_keys_values(self, layer: int) -> tuple[AnyLevels, AnyLevels]:
        """Blocks of one layer of what ``ForwardBatch.rest`` sees."""
        ...


class BatchAttention(Protocol):
    """Attention of one batch's tokens, layer by layer, over the paged cache they were just stored
    in."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        cache: LayerCache,
        shares: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q: [T, Hq, D] -> [T, Hq, D]. ``sinks`` float32 [Hq] are logits that take part in each
        head's softmax and carry no value.

        ``shares``, contiguous float32 [T, Hq], is filled with the logarithm of the attention that
        each query gave to the newest ``ForwardBatch.recent`` entries that it saw.
        """
        ...


class AttentionBackend(Protocol):
    """One way to compute attention; ``select.py`` lists them and what each can do."""

    replays: bool
    """Whether the plan of a decoding batch stays valid when its tensors' contents change, with
    lengths up to ``columns`` blocks. Such a plan keeps the tensors' addresses, copies nothing from
    them, and is the same for all lengths.
    """
    replays_chunks: bool
    """The same of a batch of chunks."""
    reads_remainders: bool
    """Whether it attends to ``ForwardBatch.remainders``."""

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        """Prepare what this backend needs to know of a batch, once for all layers."""
        ...
