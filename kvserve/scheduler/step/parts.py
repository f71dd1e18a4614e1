"""What the phases of a step share."""

from __future__ import annotations

from dataclasses import dataclass

from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.compression.compression_scheduler import CompressionScheduler
from kvserve.scheduler.offload.conversations import Conversations
from kvserve.scheduler.offload.swap_space import SwapSpace
from kvserve.scheduler.rows.prefixes import Prefixes
from kvserve.scheduler.rows.queue import WaitingQueue
from kvserve.scheduler.rows.row_table import RowTable


@dataclass(frozen=True, slots=True)
class Parts:
    """The state of a scheduler; ``conversations`` are ``None`` if continuations are off."""

    rows: RowTable
    blocks: BlockManager
    events: CompressionScheduler
    prefixes: Prefixes
    waiting: WaitingQueue
    swap: SwapSpace
    conversations: Conversations | None
