"""What events work on, and what each kind of them does to entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kvserve.engine.attention.base import AttentionBackend
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.policies.base import Policy
from kvserve.late import Made
from kvserve.scheduler.messages.event import Events


@dataclass(frozen=True)
class EventParts:
    """What events work on. ``statistics``: of the model's queries, for policies that score by
    them."""

    model: Transformer
    cache: KVCache
    batch: InputBatch
    attention: AttentionBackend
    group: RankGroup
    statistics: Made[Any] | None


class DeviceEvents(Protocol):
    """What one kind of event does to entries."""

    def observe(self, events: Events, policy: Policy) -> tuple[Tensor, dict[int, Any]]:
        """What events will keep: an answer for the host, by KV group, and by sequence what
        ``apply`` needs."""
        ...

    def apply(self, events: Events, policy: Policy, found: Mapping[int, Any]) -> None:
        """Carry out events; ``found`` is what ``observe`` found in an earlier step."""
        ...
