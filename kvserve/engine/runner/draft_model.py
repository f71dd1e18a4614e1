"""A draft model: it reads what rows have got, and guesses the tokens that follow, in one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvserve.config import ModelConfig
from kvserve.engine.attention.base import AttentionBackend, ForwardBatch
from kvserve.engine.attention.select import Choice, Needs, select_backend
from kvserve.engine.cache.draft_rows import DraftCache, DraftRows
from kvserve.engine.cache.guessing_rows import GuessingRows
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.implementation import load
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.runner.cuda_graph import DecodeGraphs
from kvserve.engine.runner.recorded_steps import MOST_RECORDED_TOKENS, RecordedSteps
from kvserve.kernels.decode_inputs import FillInputs
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.draft_group import DraftBound, DraftSpec
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.drafts import DraftChunks


class DraftModel:
    """Guesses for all rows that ask, together: a forward over what they have got, then one for each
    further guess. Draws as the rows do: the same settings, seed and position. The first rank has
    it, whole: only there is known how rows draw."""

    def __init__(
        self,
        model: Transformer,
        cache: DraftCache,
        rows: DraftRows,
        batch: InputBatch,
        attention: AttentionBackend,
        fill: FillInputs,
        *,
        sizes: Sequence[int] = (),
        records: bool = False,
    ) -> None:
        """Steps of these ``sizes`` are captured, if there are any. ``records``: forwards over few
        tokens are recorded. ``fill`` as for an ``InputBatch``."""
        self.model = model
        self._cache, self._rows, self._batch, self._attention = cache, rows, batch, attention
        self._window = model.spec.window if model.spec.windowed else None
        self._guessing = GuessingRows(rows, batch.prompt_lens, self._window, fill)
        self._steps: DecodeGraphs | RecordedSteps | None = None
        parts, kinds = (model, cache, self._guessing, attention), (False,)
        if records:
            self._steps = RecordedSteps(*parts, kinds)
        elif sizes:
            self._steps = DecodeGraphs(*parts, list(sizes), kinds)

    def guess(self, chunks: DraftChunks) -> Tensor | None:
        """The guesses of ``chunks``, row by row: int64 [G]; ``None`` if all chunks only catch up.

        Entries of a row's guesses, but of the last one, are stored behind those of its chunk.
        """
        asks, device = np.flatnonzero(chunks.guesses), self._batch.device
        last = np.cumsum(chunks.lengths) - 1
        token_ids = to_device(chunks.token_ids, device)
        reads = chunks.rows, chunks.starts, chunks.dropped, chunks.lengths
        hidden = self._hidden(token_ids, *reads, last[asks])
        if not len(asks):
            return None
        left, rows, dropped = (x[asks] for x in (chunks.guesses, chunks.rows, chunks.dropped))
        positions, places = (chunks.starts + chunks.lengths)[asks], np.cumsum(left) - left
        guesses = torch.empty(int(left.sum()), dtype=torch.int64, device=device)
        guesses[to_device(places, device)] = tokens = self._choose(hidden, rows, positions)
        # Rows with the most guesses come first, so that those with another one stay in front.
        order = np.argsort(-left, kind="stable")
        tokens = tokens[to_device(order, device)]
        left, *whose, places = (x[order] for x in (left, rows, positions, dropped, places))
        for done, more in enumerate(self._further(tokens, left, *whose), start=1):
            guesses[to_device(places[: len(more)] + done, device)] = more
        return guesses

    def _further(
        self, tokens: Tensor, left: IntArray, rows: IntArray, positions: IntArray, dropped: IntArray
    ) -> Iterator[Tensor]:
        """What follows the first guesses ``tokens [n]`` at ``positions [n]``, one after the other,
        of those rows that have more ``left [n]``, which descend."""
        steps = self._steps
        counts = [int((left > done).sum()) for done in range(1, int(left[0]))]
        plays = steps is not None and bool(counts) and steps.hold(counts[0])
        if plays:
            first = slice(counts[0])
            self._guessing.begin(rows[first], positions[first], dropped[first], len(counts))
        for done, n in enumerate(counts):
            if steps is not None and plays:
                self._guessing.tokens[:n] = tokens[:n]
                hidden = steps.decode(n)
            else:
                ones = np.ones(n, np.int32)
                hidden = self._hidden(tokens[:n], rows[:n], positions[:n] + done, dropped[:n], ones)
            tokens = self._choose(hidden, rows[:n], positions[:n] + done + 1)
            yield tokens

    def rehearse(self, tokens: int) -> None:
        """Read ``tokens`` tokens that see no entries and are stored in the null block."""
        zero = np.zeros(1, np.int32)
        batch = self._of(zero, zero, zero, np.array([tokens], np.int32))
        zeros = torch.zeros_like(batch.slots)
        columns = np.array([batch.tables.shape[3]])
        nothing: dict[str, Any] = {"slots": zeros, "last": zeros - 1, "columns": columns}
        windowed = batch.windowed and replace(batch.windowed, **nothing)
        batch = replace(batch, **nothing, windowed=windowed)
        ids = torch.zeros(tokens, dtype=torch.int64, device=self._batch.device)
        self.model(ids, batch, self._cache, self._attention.plan(batch))

    def _hidden(
        self,
        token_ids: Tensor,
        rows: IntArray,
        starts: IntArray,
        dropped: IntArray,
        lengths: IntArray,
        wanted: IntArray | None = None,
    ) -> Tensor:
        """Hidden states of the ``wanted`` tokens of chunks (``None``: of all): [W, hidden]."""
        batch, at = self._of(rows, starts, dropped, lengths), None
        if wanted is not None and len(wanted) < len(token_ids):
            at = to_device(wanted, token_ids.device)
        if isinstance(self._steps, RecordedSteps) and len(token_ids) <= MOST_RECORDED_TOKENS:
            hidden = self._steps.chunks.forward(token_ids, batch)
            return hidden if at is None else hidden[at]
        return self.model(token_ids, batch, self._cache, self._attention.plan(batch), at)

    def _of(
        self, rows: IntArray, starts: IntArray, dropped: IntArray, lengths: IntArray
    ) -> ForwardBatch:
        prompts, window = self._batch.prompt_lens, self._window
        return self._rows.batch(rows, starts, dropped, lengths, prompts, window)

    def _choose(self, hidden: Tensor, rows: IntArray, positions: IntArray) -> Tensor:
        """What ``rows [n]`` would sample at ``positions [n]`` of the draft model's logits: [n]."""
        logits = self.model.logits(hidden)
        at = to_device(positions, hidden.device)
        return self._batch.sampling.choose(logits, rows, at, argmax=self.model.operators.argmax)


@dataclass(frozen=True)
class DraftPlan:
    """What was decided about a draft model before it is loaded; it is the ``config.model``."""

    config: ModelConfig
    directory: Path
    spec: ModelSpec
    layout: KVLayout
    dtype: torch.dtype
    device: str
    attention: str
    """``--attention-backend``."""
    bound: DraftBound | None = None
    """Of what a row's entries hold."""

    @property
    def group(self) -> DraftSpec:
        """The cache group of its entries."""
        layout = self.layout
        return DraftSpec(layout.block_size, layout.layer_groups, layout.rows, self.bound)

    def load(self) -> Transformer:
        """The model with its weights."""
        return load(self.directory, self.config, self.spec, self.dtype, self.device)

    def chosen_attention(self) -> Choice:
        """``ConfigError`` if the backend that was named cannot serve this model."""
        dim, spec = self.spec.head_dim, self.spec
        needs = Needs(
            self.device,
            self.dtype,
            dim,
            self.layout.block_size,
            dim**-0.5,
            per_head=self.layout.rows > 1,
            sinks=spec.sinks,
            soft_cap=spec.soft_cap,
            windowed=spec.windowed,
        )
        return select_backend(self.attention, needs)

    def build(
        self,
        model: Transformer,
        pool: Tensor,
        batch: InputBatch,
        fill: FillInputs,
        *,
        sizes: Sequence[int],
        eager: bool,
        max_len: int,
    ) -> DraftModel:
        """The draft ``model`` over the blocks of ``pool``, for the rows of ``batch``. Steps of
        these ``sizes`` are captured if attention allows; if ``eager``, nothing is recorded.
        Positions are below ``max_len``."""
        attention = self.chosen_attention()
        cache = DraftCache(pool, self.layout, self.dtype, attention.store_kv)
        (rows,) = (group for group in batch.groups if isinstance(group, DraftRows))
        model.tabulate(max_len)
        return DraftModel(
            *(model, cache, rows, batch, attention.backend, fill),
            sizes=sizes if attention.backend.replays else (),
            records=attention.name == "cpu" and not eager,
        )
