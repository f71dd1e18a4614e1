"""Follows every sequence of an engine: positions held, what events saw and chose, logits.

What it keeps lies in host memory, wherever the engine runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvserve import LLM
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.level_entries import FewEntries, QuantizedEntries
from kvserve.engine.compression.moves import MovePlan
from kvserve.engine.frontend.inspect import Event, KeptPositions
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.scoring import Observation
from kvserve.engine.runner.model_runner import LaunchedStep
from kvserve.kernels.move.move_kv import gather_kv_torch
from kvserve.kernels.store.few_bits import FewBlocks
from kvserve.kernels.store.quantized_entries import QuantizedVectors
from kvserve.kernels.store.slot_mapping import places_of, slot_mapping
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.saved_row import NO_PLACE
from kvserve.scheduler.triggers.trigger import EvictionSpec
from tests.engine.few_reference import Stored


@dataclass(frozen=True)
class Choice:
    """One event: scores [W, L', Hkv, S'] of its W windows, and what was kept of each."""

    plan: EvictionSpec
    scores: Tensor
    kept: Tensor


@dataclass
class Record:
    """One sequence; events start anew when it is admitted again."""

    kept: KeptPositions
    choices: list[Choice] = field(default_factory=list)
    copied: list[bool] = field(default_factory=list)
    """Whether each event left keys and values equal, bit for bit, to those it kept."""
    stored: list[list[Tensor]] = field(default_factory=list)
    """Levels, if the recorder reads them: of each step that computed tokens, of the layers that see
    all and then of those with windows, as ``Recorder._entries`` gives them."""

    @property
    def num_stored(self) -> int:
        """Tokens whose levels are there."""
        return sum(parts[0].shape[3] for parts in self.stored)

    def levels(self) -> list[Tensor]:
        """Those of all tokens, by kind of layer: uint8 [1, L', Hkv, T, bytes]."""
        return [torch.cat(parts, dim=3) for parts in zip(*self.stored, strict=True)]

    @property
    def events(self) -> list[Event]:
        return self.kept.events


class _Watched:
    """A policy whose choices are written down."""

    def __init__(self, policy: Policy, choices: list[tuple[Tensor, Tensor]]) -> None:
        self._policy = policy
        self._choices = choices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def score(self, obs: Observation) -> Tensor:
        scores = self._policy.score(obs)
        assert scores.dtype == torch.float32
        return scores

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        kept = self._policy.select(scores, length, keep)
        assert kept.shape == (*scores.shape[:3], keep)
        self._choices.append((scores, kept))
        return kept


class Recorder:
    """``records`` and ``logits`` by sequence id, from when it is made; one per engine. With
    ``levels`` it reads what is stored of each token, where entries are held in few bits and a row's
    lanes have one length; no event may have changed them when it reads them again."""

    def __init__(self, llm: LLM, *, levels: bool = False) -> None:
        self.llm = llm
        self.records: dict[int, Record] = {}
        self.logits: dict[int, list[Tensor]] = defaultdict(list)
        self._runner = runner = llm.engine.core.runner
        self._levels = levels and runner.cache.form.quantized
        self._owner: dict[int, int] = {}
        self._choices: list[tuple[Tensor, Tensor]] = []
        self._new: list[Tensor] = []
        self._sources: dict[int, Tensor] = {}
        self._launch, self._run = runner.launch, runner.compressor.run
        self._model_logits = runner.model.logits
        runner.launch = self._on_launch  # type: ignore[method-assign]
        runner.compressor.run = self._on_run  # type: ignore[method-assign]
        runner.compressor.on_moves = self._on_moves
        runner.model.logits = self._on_logits  # type: ignore[method-assign]

    def clear(self) -> None:
        """Forget sequences that have ended."""
        self.records.clear()
        self.logits.clear()

    def _on_launch(self, output: SchedulerOutput) -> LaunchedStep:
        self._new = []
        step = self._launch(output)
        if step.sampled is not None:
            self._take_logits(output, step.sampled.token_ids.cpu().numpy())
        for a, b in output.row_swaps:
            self._owner[a], self._owner[b] = self._owner.get(b, -1), self._owner.get(a, -1)
        layout = self._runner.cache.layout
        moves = () if output.moves is None else output.moves.ins
        back = {move.row for move in moves if move.place != NO_PLACE}
        for seq in output.admitted.requests:
            self._owner[seq.row] = seq.seq_id
            if seq.row in back:
                continue
            kept = KeptPositions(layout.num_layers, layout.num_kv_heads)
            self.records[seq.seq_id] = Record(kept)
        if self._levels:
            self._take_levels([*range(output.num_decoding), *output.prefill.rows.tolist()])
        return step

    def _take_levels(self, rows: list[int]) -> None:
        """What the tokens that a step has computed are stored as."""
        batch, kinds = self._runner.batch, self._runner.cache.layers
        for row in rows:
            record = self.records[self._owner[row]]
            end, computed = int(batch.kv_lens[0, row, 0]), int(batch.num_computed[row])
            new = computed - record.num_stored
            tables, at = batch.block_tables[:, [row]], range(end - new, end)
            parts = [self._entries(tables, at, kinds.full)]
            windows = [group for group in batch.groups if type(group).__name__ == "WindowRows"]
            if windows:  # in the columns of their positions
                [tables] = windows[0].tables
                at = range(computed - new, computed)
                parts.append(self._entries(tables[:, [row]], at, sorted(kinds.windowed)))
            record.stored.append(parts)

    def _on_logits(self, hidden: Tensor) -> Tensor:
        logits = self._model_logits(hidden)
        self._new += logits.clone().cpu()
        return logits

    def _take_logits(self, output: SchedulerOutput, tokens: IntArray) -> None:
        """Those that each sampled token came from; of guesses only up to the first wrong one."""
        counts = np.ones(len(output.sampled), np.int32)
        lengths = counts.copy()
        if output.drafts is not None:
            lengths[: output.num_decoding] = output.drafts.lengths
            guessed = tokens[: len(output.drafts.token_ids)]
            counts[: output.num_decoding] = output.drafts.confirmed(guessed)
        for seq, first, count in zip(
            output.sampled, np.cumsum(lengths) - lengths, counts, strict=True
        ):
            self.logits[seq.seq_id] += self._new[first : first + count]

    def _on_run(
        self,
        task: Events,
        policy: Policy,
        block_tables: Tensor,
        log_tables: Tensor,
        on_kept: Callable[..., None] | None = None,
    ) -> None:
        events = range(len(task.rows))
        tables = [block_tables[:, [int(row)]] for row in task.rows]
        full = self._runner.cache.layers.full
        before = [self._entries(tables[e], range(task.old_lens[0, e, 0]), full) for e in events]
        watched: Any = _Watched(policy, self._choices)
        self._run(task, watched, block_tables, log_tables, on_kept)
        size = self._runner.cache.layout.block_size
        for e in events:
            start, new = int(task.copy_start[e]), int(task.new_lens[0, e, 0])
            columns = slice(start // size, -(-new // size))
            after_table = tables[e].clone()
            written = torch.as_tensor(task.dst_blocks[:, e])
            after_table[:, 0, :, columns] = written[..., : columns.stop - columns.start]
            after = self._entries(after_table, range(new), full)
            source = self._sources.pop(int(task.rows[e]))
            moved = before[e].gather(
                3, source[None, ..., None].expand(len(after), -1, -1, -1, after.shape[4])
            )
            same = torch.equal(after[..., :start, :], before[e][..., :start, :])
            same = same and torch.equal(after[..., start:, :], moved)
            record = self.records[self._owner[int(task.rows[e])]]
            if self._levels:  # nor has anything changed since they were stored
                held = torch.as_tensor(record.events[-1].held).long()[None, ..., None]
                stored = record.levels()[0]
                kept = stored.gather(3, held.expand(*held.shape[:4], stored.shape[4]))
                same = same and torch.equal(after, kept)
            record.copied.append(same)

    def _on_moves(self, task: Events, plan: MovePlan) -> None:
        """One group of equal-shaped events; its choices were made since the last group."""
        scores, kept = (torch.cat(parts).cpu() for parts in zip(*self._choices, strict=True))
        self._choices.clear()
        windows = np.cumsum([0, *task.plan.windows])
        for e, row in enumerate(task.rows):
            record = self.records[self._owner[int(row)]]
            places = int(plan.counts[e].max())
            only = slice(e, e + 1)
            one = MovePlan(plan.src[only, ..., :places], plan.copy_start[only], plan.counts[only])
            part = task.part(np.array([e]))
            record.kept.on_moves(part, one)
            at = slice(windows[e], windows[e + 1])
            record.choices.append(Choice(part.plan, scores[at], kept[at]))
            self._sources[int(row)] = one.src[0].cpu()

    def _entries(self, table: Tensor, at: range, layers: Sequence[int]) -> Tensor:
        """Keys and values of a row's entries ``at``, as ``layers [L']`` of one kind store them: [2,
        L', Hkv, n, D], or bytes [1, L', Hkv, n, bytes]. ``table [LG, 1, R, M]`` is theirs."""
        cache = self._runner.cache
        layout = cache.layout
        places = len(table) * layout.layers_per_block  # a last table may have room for more
        device = table.device
        rows = torch.zeros(len(at), dtype=torch.long, device=device)
        lanes = torch.arange(at.start, at.stop, device=device)
        lanes = lanes.expand(places, layout.num_kv_heads, -1)
        slots = slot_mapping(table, rows, lanes, layout.block_size)
        if isinstance(cache.entries, FewEntries):
            parts = [
                _bytes_of(cache.entries.blocks, *each) for each in zip(layers, slots, strict=False)
            ]
            return torch.stack(parts)[None].cpu()
        if isinstance(cache.entries, QuantizedEntries):
            blocks, where = cache.entries.blocks, places_of(cache.entries.blocks.keys.shape, slots)
            parts = [part[where] for held in (blocks.keys, blocks.values) for part in held.parts]
            stored = [part.view(torch.uint8).view(*slots.shape, -1) for part in parts]
            return torch.cat(stored, dim=-1)[None, : len(layers)].cpu()
        parts = [gather_kv_torch(cache.kv, slots, None, values) for values in (False, True)]
        return torch.stack(parts).cpu()


def _bytes_of(blocks: FewBlocks, layer: int, slots: Tensor) -> Tensor:
    """What is stored of the entries in slots [Hkv, n]: uint8 [Hkv, n, bytes]."""
    return torch.cat([blocks.bytes_at(held, slots) for held in blocks.layer(layer)], dim=-1)


def vectors_of(levels: Tensor, cache: KVCache, layer: int) -> tuple[Stored | QuantizedVectors, ...]:
    """A layer's keys and values from their levels [..., bytes], as ``Record.levels`` gives them."""
    form, dim = cache.form, cache.layout.head_dim
    if isinstance(cache.entries, FewEntries):
        blocks = cache.entries.blocks
        keys, values = blocks.layer(layer)
        parts = levels.split([keys.form.size(dim), values.form.size(dim)], dim=-1)
        shaping = blocks.layers[layer].shaping
        return tuple(Stored.of(x, of, shaping) for x, of in zip(parts, (keys, values), strict=True))
    found, first = [], 0
    for of in (form.key, form.value):
        widths = [of.levels(dim), *[2] * (1 + of.low)]
        own, *ranges = levels[..., first : first + sum(widths)].split(widths, dim=-1)
        ranges = [part.contiguous().view(torch.bfloat16)[..., 0] for part in ranges]
        found.append(QuantizedVectors(of, own, *ranges))
        first += sum(widths)
    return tuple(found)
