"""What differs between the kinds of events on the device: how they are scored and carried out.

Their counterparts, which know lengths and blocks, are in ``scheduler/compression/handlers.py``.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kvserve.engine.cache.code_rows import CodeRows
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.compression.choices import Kept
from kvserve.engine.compression.coder import Coder, Found
from kvserve.engine.compression.compressor import Compressor
from kvserve.engine.compression.moves import groups_of, lanes_of
from kvserve.engine.compression.pending_selections import PendingSelections
from kvserve.engine.compression.pruned_prefill import PrunedPrefill
from kvserve.engine.device.transfer import to_device
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.spindlekv import SpindleKV
from kvserve.scheduler.messages.output import CompactionTask, ObservationTask


class DeviceEvenEvents:
    """Events that leave equally many entries in all lanes: scored and carried out at once."""

    def __init__(self, compressor: Compressor, batch: InputBatch) -> None:
        self._compressor = compressor
        self._batch = batch

    def begin_step(self) -> None:
        """Drop the scores of earlier steps that no event has used; even events have none."""

    def score(self, task: ObservationTask, policy: Policy) -> Tensor:
        """What the host needs to know of the events (``messages.event.answer``)."""
        raise AssertionError("their lengths are known beforehand")

    def apply(self, task: CompactionTask, policy: Policy) -> None:
        """Carry out events, with the tables from before them."""
        scores = self._batch.kept_scores.first(policy.kept_scores)
        tables = self._batch.block_tables, self._batch.log_tables
        self._compressor.run(task, policy, *tables, scores)


class DeviceUnevenEvents(DeviceEvenEvents):
    """Events whose counts go to the host before they are carried out."""

    def __init__(self, compressor: Compressor, batch: InputBatch, *, overlaps: bool) -> None:
        super().__init__(compressor, batch)
        self._pending: PendingSelections[Kept] = PendingSelections(overlaps=overlaps)
        self._found: dict[int, Kept] = {}

    def begin_step(self) -> None:
        self._found = self._pending.take()

    def score(self, task: ObservationTask, policy: Policy) -> Tensor:
        tables = self._batch.block_tables, self._batch.log_tables
        counts, kept = self._compressor.observe(task, policy, *tables)
        self._pending.add(kept)
        return groups_of(counts, self._batch.layout)

    def apply(self, task: CompactionTask, policy: Policy) -> None:
        self._compressor.run_observed(task, policy, self._found, self._batch.block_tables)


class DeviceBlockEvents(DeviceUnevenEvents):
    """Events that keep whole blocks: the host is told which, and no entry moves."""

    def score(self, task: ObservationTask, policy: Policy) -> Tensor:
        """Kept columns [LG, E, R, K], -1 behind the last."""
        layout, batch = self._batch.layout, self._batch
        size = layout.block_size
        lanes = len(task.rows), layout.num_layers, layout.num_kv_heads
        most = int(-(-task.plan.keep.max() // size))
        kept = torch.full((*lanes, most), -1, dtype=torch.int64, device=batch.device)
        for choice in self._compressor.choices(task, policy, batch.block_tables, batch.log_tables):
            columns = choice.entries[..., ::size] // size
            kept[to_device(choice.events, kept.device), ..., : columns.shape[-1]] = columns
            self._pending.add(choice.by_sequence())
        return groups_of(kept, layout)

    def apply(self, task: CompactionTask, policy: Policy) -> None:
        self._compressor.run_observed(
            task, policy, self._found, self._batch.block_tables, in_place=True
        )


class DeviceCodedEvents(DeviceEvenEvents):
    """Events that turn entries into codes, in a step after the one that scored them."""

    def __init__(
        self, compressor: Compressor, batch: InputBatch, codes: CodeRows, *, overlaps: bool
    ) -> None:
        super().__init__(compressor, batch)
        self._codes, self._coder = codes, Coder(codes.cache, codes.store, compressor)
        self._pending: PendingSelections[tuple[Found, int]] = PendingSelections(overlaps=overlaps)
        self._found: dict[int, tuple[Found, int]] = {}

    def begin_step(self) -> None:
        self._found = self._pending.take()

    def score(self, task: ObservationTask, policy: Policy) -> Tensor:
        """Entries kept and the vectors they need: [LG, E, R, 2]."""
        tables = self._codes.code_tables(self._batch.block_tables, self._batch.log_tables)
        counts, found = self._coder.observe(task, cast(SpindleKV, policy), tables)
        self._pending.add(found)
        return counts

    def apply(self, task: CompactionTask, policy: Policy) -> None:
        self._coder.run(task, self._found)


class DevicePrunedEvents(DeviceUnevenEvents):
    """Events of a policy that prunes prompts as they are computed; later ones are uneven."""

    def __init__(
        self,
        compressor: Compressor,
        batch: InputBatch,
        prefill: PrunedPrefill,
        *,
        overlaps: bool,
    ) -> None:
        super().__init__(compressor, batch, overlaps=overlaps)
        self._prefill = prefill

    def compute(self, task: CompactionTask, policy: Policy, *, logs_queries: bool) -> Tensor:
        """Compute the prompt of ``task``'s only row; its last hidden state [1, hidden]."""
        last, held = self._prefill.run(task, policy, logs_queries)
        self._compressor.tell(task, held, lanes_of(task.new_lens, self._batch.layout))
        return last
