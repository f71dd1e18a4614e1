"""A draft model: it reads what rows have got, and guesses the tokens that follow, in one step."""

from __future__ import annotations

from collections.abc import Sequence
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
from kvserve.engine.runner.cuda_graph import LARGEST, DecodeGraphs
from kvserve.engine.runner.padded_step import StepParts
from kvserve.engine.runner.recorded_steps import RecordedSteps
from kvserve.kernels.decode_inputs import FillInputs
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.draft_group import DraftBound, DraftSpec
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.drafts import NEWEST, DraftChunks


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
        self.cache, self.attention = cache, attention
        self._rows, self._batch = rows, batch
        self._window = model.spec.window if model.spec.windowed else None
        self._guessing = GuessingRows(rows, batch.prompt_lens, self._window, fill, batch.device)
        self.steps: DecodeGraphs | RecordedSteps | None = None
        parts, kinds = StepParts(model, cache, self._guessing, attention), (False,)
        if sizes:
            self.steps = DecodeGraphs(parts, sizes, kinds, NEWEST)
        elif records:
            self.steps = RecordedSteps(parts, kinds, longest=NEWEST)

    def guess(self, chunks: DraftChunks) -> Tensor | None:
        """The guesses of ``chunks``, row by row: int64 [G]; ``None`` if all chunks only catch up.

        Entries of a row's guesses, but of the last one, are stored behind those of its chunk.
        """
        first = np.cumsum(chunks.guesses) - chunks.guesses
        # Rows with the most guesses come first, so that those with another one stay in front.
        order = np.argsort(-chunks.guesses, kind="stable")
        chunks, first = chunks.part(order), first[order]
        counts = [int((chunks.guesses > done).sum()) for done in range(int(chunks.guesses[0]))]
        plays = self._plays(chunks, counts[1:])
        hidden = self._read(chunks, sum(counts[:1]), plays=plays)
        guesses, places = list[Tensor](), list[IntArray]()
        for done, n in enumerate(counts):
            positions = chunks.starts[:n] + chunks.lengths[:n] + done
            if done:
                tokens = guesses[-1][:n]
                hidden = self._read_one(tokens, chunks, positions - 1, plays=plays)
            guesses.append(self._choose(hidden, chunks.rows[:n], positions))
            places.append(first[:n] + done)
        if not guesses:
            return None
        by_row = to_device(np.argsort(np.concatenate(places)), self._batch.device)
        return torch.cat(guesses)[by_row]

    def _plays(self, chunks: DraftChunks, further: list[int]) -> bool:
        """Whether the steps of ``chunks``, and of so many rows each that guess on, are captured or
        recorded."""
        steps = self.steps
        if steps is None or not steps.hold_chunks(chunks.lengths):
            return False
        return not further or steps.hold(further[0])

    def _read(self, chunks: DraftChunks, asking: int, *, plays: bool) -> Tensor:
        """Hidden states of the last tokens of the first ``asking`` chunks."""
        token_ids = to_device(chunks.token_ids, self._batch.device)
        last = to_device(np.cumsum(chunks.lengths)[:asking] - 1, self._batch.device)
        if plays and self.steps is not None:
            most = int((chunks.lengths + chunks.guesses).max())
            self._guessing.begin(chunks.rows, chunks.starts, chunks.dropped, most)
            return self.steps.chunks(chunks.lengths, token_ids)[last]
        batch = self._of(chunks.rows, chunks.starts, chunks.dropped, chunks.lengths)
        return self.model(token_ids, batch, self.cache, self.attention.plan(batch), last)

    def _read_one(
        self, tokens: Tensor, chunks: DraftChunks, positions: IntArray, *, plays: bool
    ) -> Tensor:
        """Hidden states of ``tokens [n]``, one at ``positions [n]`` of each of the first rows."""
        n = len(tokens)
        if plays and self.steps is not None:
            self._guessing.tokens[:n] = tokens
            return self.steps.decode(n)
        ones = np.ones(n, np.int32)
        batch = self._of(chunks.rows[:n], positions, chunks.dropped[:n], ones)
        return self.model(tokens, batch, self.cache, self.attention.plan(batch))

    def rehearse(self, tokens: int) -> None:
        """Read ``tokens`` tokens that see no entries and are stored in the null block."""
        batch = self.padding(tokens)
        ids = torch.zeros(tokens, dtype=torch.int64, device=self._batch.device)
        self.model(ids, batch, self.cache, self.attention.plan(batch))

    def padding(self, tokens: int) -> ForwardBatch:
        """A chunk of such tokens."""
        zero = np.zeros(1, np.int32)
        batch = self._of(zero, zero, zero, np.array([tokens], np.int32))
        zeros = torch.zeros_like(batch.slots)
        columns = np.array([batch.tables.shape[3]])
        nothing: dict[str, Any] = {"slots": zeros, "last": zeros - 1, "columns": columns}
        windowed = batch.windowed and replace(batch.windowed, **nothing)
        positions = torch.zeros_like(batch.positions)  # a step may be longer than any sequence
        return replace(batch, **nothing, positions=positions, windowed=windowed)

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
        these ``sizes`` are captured if attention and layers allow; if ``eager``, nothing is
        recorded. Positions are below ``max_len``."""
        attention = self.chosen_attention()
        cache = DraftCache(pool, self.layout, self.dtype, attention.store_kv)
        (rows,) = (group for group in batch.groups if isinstance(group, DraftRows))
        model.tabulate(max_len)
        backend, borrowed = attention.backend, self.spec.borrowed
        # As many rows as have graphs of chunks, which come before single tokens.
        captured = [size for size in sizes if size * NEWEST <= LARGEST]
        return DraftModel(
            *(model, cache, rows, batch, backend, fill),
            sizes=captured if backend.replays_chunks and backend.replays and not borrowed else (),
            records=attention.name == "cpu" and not eager and not borrowed,
        )
