"""What a scheduler is told when it is made, and what the phases of its steps share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.cache_group import GroupSpec
from kvserve.scheduler.compression.compression_scheduler import CompressionScheduler
from kvserve.scheduler.rows.queue import WaitingQueue
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.step.saved_rows import SavedRows

if TYPE_CHECKING:
    from kvserve.scheduler.speculation.speculation import NgramSettings


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Sizes in blocks, tokens and sequences; ``num_blocks`` counts the null block.

    ``max_observed_tokens`` (default: ``max_num_batched_tokens``): queries that the events of a step
    observe. ``admission_reserve``: tokens of growth kept for each running sequence.
    ``speculation``: how the next tokens of sequences are guessed, if they are.
    ``max_prefill_tokens`` (default: ``max_num_batched_tokens``): tokens of prompts in a step that
    also decodes. ``max_num_seqs_per_client`` (default: ``max_num_seqs``): rows of one client.
    """

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    log_block_tokens: int
    chunked_prefill: bool = True
    prefix_caching: bool = True
    continuations: bool = False
    max_continuation_blocks: int | None = None
    num_host_blocks: int = 0
    max_observed_tokens: int | None = None
    admission_reserve: int = 32
    max_prefill_tokens: int | None = None
    max_num_seqs_per_client: int | None = None
    further_groups: tuple[GroupSpec, ...] = ()
    speculation: NgramSettings | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """The state of a scheduler."""

    rows: RowTable
    blocks: BlockManager
    events: CompressionScheduler
    waiting: WaitingQueue
    saved: SavedRows
