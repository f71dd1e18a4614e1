"""Rows that are held as codes: their tables on the device, and what attention gets of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvserve.engine.attention.coded_rows import CodeTables
from kvserve.engine.cache.code_store import CodeStore
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.row_groups import KINDS, RowGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.transformer import Transformer
from kvserve.kernels.coded_entries import Codes
from kvserve.scheduler.blocks.code_group import CodeSpec
from kvserve.scheduler.messages.output import CompactionTask
from kvserve.scheduler.row_schema import per_group


class CodeRows(RowGroup):
    """Index and vector tables; ``coded`` entries and ``num_vectors`` of each lane."""

    spec_type = CodeSpec
    coded: Tensor = per_group()
    num_vectors: Tensor = per_group()
    _codes: tuple[Codes, ...]
    """By layer group, as attention reads them."""

    def attach(self, cache: KVCache, model: Transformer, max_len: int) -> None:
        assert isinstance(self.spec, CodeSpec) and model.rotary.inv_freq is not None
        self.cache = cache
        self.store = CodeStore(cache.kv, model.rotary.inv_freq, max_len)
        self._codes = tuple(map(self.store.codes, self.coded, *self.tables))

    def after_compaction(self, task: CompactionTask, rows: Tensor) -> None:
        if task.codes is not None:
            self.coded[:, rows] = to_device(task.codes.coded, self.coded.device)
            self.num_vectors[:, rows] = to_device(task.codes.num_vectors, self.coded.device)

    def of_batch(self) -> dict[str, Any]:
        return {"codes": self._codes}

    def code_tables(self, kv: Tensor, log: Tensor) -> CodeTables:
        """What ``Coder.observe`` reads, of all rows."""
        index, vectors = self.tables
        return CodeTables(kv, log, index, vectors, self.coded, self.num_vectors)


KINDS.append(CodeRows)
