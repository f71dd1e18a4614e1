"""What the engine gives back: per request, per choice, and about itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log of a token's probability before any sampling setting, and its rank (1 = best)."""

    logprob: float
    rank: int
    decoded_token: str = ""


@dataclass(frozen=True, slots=True)
class KVCacheDetails:
    """Proof of what the policy did to one request (``usage.kv_cache_details``).

    ``held_tokens`` is the mean over layers and KV heads, rounded up; ``held_entries`` their sum;
    ``evicted_tokens = logical_tokens - held_tokens``. ``held_bytes`` are those of all blocks that
    held its entries at its end, ``log_bytes`` those of its logged queries. Of its entries
    ``coded_entries`` were held as codes, with ``codebook_entries`` vectors for their keys and
    values. ``resumed_tokens`` were held already by what an earlier turn had left. Choices of one
    request are summed.
    """

    policy: str = "none"
    logical_tokens: int = 0
    held_tokens: int = 0
    held_entries: int = 0
    evicted_tokens: int = 0
    compactions: int = 0
    blocks_released: int = 0
    peak_blocks: int = 0
    held_bytes: int = 0
    log_bytes: int = 0
    coded_entries: int = 0
    codebook_entries: int = 0
    resumed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Compaction:
    """One event: ``reason`` is due, or pressure where it came early for want of blocks.

    ``evicted_tokens`` and ``held_tokens`` (after it) are means over layers and KV heads.
    """

    reason: str
    time: float
    evicted_tokens: int
    held_tokens: int


@dataclass(frozen=True, slots=True)
class KVTraceEvent:
    """One event of a request with ``kv_trace``: which of its positions left the cache.

    ``dropped[layer][kv_head]`` are runs ``first, end, first, end, ...`` of the first ``seen``
    positions. ``reason`` is that of ``Compaction``, or start: the cache is empty, and was not if
    the sequence was preempted and begins anew. ``queries`` scored it (0: keys alone).
    """

    reason: str
    time: float
    seen: int
    dropped: list[list[list[int]]]
    blocks_released: int = 0
    queries: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One choice. ``text`` and ``token_ids`` grow; ``logprobs[i]`` belongs to ``token_ids[i]``."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    kv_trace: list[KVTraceEvent] | None = None
    """Where the request asked for it; the first one is a start."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request after a step. The same object is updated from step to step."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    kv_cache_details: KVCacheDetails = field(default_factory=KVCacheDetails)
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per prompt token; the first has nothing before it that could predict it."""
    compactions: list[Compaction] = field(default_factory=list)
    """Those so far, of all choices."""
    engine: str = "0"
    """The replica that made it."""


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds since the epoch, as the client of the engine saw them."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    queued_seconds: float = 0.0
    """Until the engine first gave it a row."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One running request, for ``GET /v1/kv/stats``."""

    request_id: str
    policy: str
    logical_tokens: int
    held_tokens: int
    blocks: int
    compactions: int
    held_bytes: int = 0


ITERATION_TOKENS = (1, *(2**i for i in range(3, 15)))
"""Sizes of steps that ``EngineStats.iterations`` tells apart: vLLM's."""


@dataclass(frozen=True, slots=True)
class CompactionCounts:
    """Events of one policy with one ``Compaction.reason``, since start."""

    policy: str
    reason: str
    events: int
    blocks_released: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state and counters (totals since start).

    ``blocks_cached`` are those that only the prefix cache and continuations name: they make room
    when needed. ``continuations`` name ``continuation_blocks``, shared ones among them; of the
    sequences that could have gone on from one, ``resumed_total`` did, from ``resumed_tokens_total``
    tokens, and ``continuation_misses`` did not, each with its cause. The
    pool has ``bytes_total`` on all ranks, ``bytes_held`` of them in blocks that requests name.
    ``swaps_total`` of the preemptions went to host memory; ``early_compactions_total`` of the
    compactions came early, for want of blocks; ``skipped_compactions_total`` did not pay.
    Of the entries of running requests ``coded_entries`` are held as codes, with
    ``codebook_entries`` vectors for their keys and values.
    ``iterations[i]`` steps had at most ``ITERATION_TOKENS[i]`` tokens, the last ones more.
    """

    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    bytes_total: int = 0
    bytes_held: int = 0
    tokens_logical: int = 0
    tokens_held: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    swaps_total: int = 0
    compactions_total: int = 0
    early_compactions_total: int = 0
    skipped_compactions_total: int = 0
    blocks_released_total: int = 0
    tokens_evicted_total: int = 0
    compaction_seconds_total: float = 0.0
    steps_total: int = 0
    scoring_workspace_bytes: int = 0
    coded_entries: int = 0
    codebook_entries: int = 0
    compaction_counts: tuple[CompactionCounts, ...] = ()
    continuations: int = 0
    continuation_blocks: int = 0
    resumed_total: int = 0
    resumed_tokens_total: int = 0
    continuation_misses: tuple[tuple[str, int], ...] = ()
    iterations: tuple[int, ...] = ()
    iteration_tokens_total: int = 0
    requests: tuple[RequestStats, ...] = ()

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's blocks in use, 0 to 1; what only the prefix cache holds is not."""
        if not self.blocks_total:
            return 0.0
        return 1.0 - (self.blocks_free + self.blocks_cached) / self.blocks_total


@dataclass(frozen=True, slots=True)
class PoolView:
    """What the blocks are held for, beside the engine's ``stats`` at the same moment.

    ``cells`` are runs over the pool, ``owner, count, owner, count, ...``, a cell for
    ``blocks_per_cell`` blocks, of which it shows the first. Owners: 0 free, 1 prefix cache, 2
    logged queries, 3 codes, 4 + i the request ``stats.requests[i]``, which logs queries in
    ``log_blocks[i]``.
    """

    time: float
    stats: EngineStats
    blocks_per_cell: int
    cells: list[int]
    log_blocks: list[int]
