"""What the engine says of itself: its statistics, running sequences, and the blocks of its pool."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One running sequence, for ``GET /v1/kv/stats``.

    A request with ``n=3`` has three, all with its ``request_id``. ``held_tokens`` is the mean over
    layers and KV heads, rounded up. ``blocks`` and ``held_bytes`` include logged queries, and
    blocks that other sequences share. ``remainder_entries`` stand for dropped ones.
    """

    request_id: str
    policy: str
    logical_tokens: int
    held_tokens: int
    blocks: int
    compactions: int
    held_bytes: int = 0
    remainder_entries: int = 0


ITERATION_TOKENS = (1, *(2**i for i in range(3, 15)))
"""Upper bounds of the step sizes that ``EngineStats.iterations`` counts, as in vLLM."""


@dataclass(frozen=True, slots=True)
class CompactionCounts:
    """Events of one policy with one ``Compaction.reason`` and the blocks released, since start."""

    policy: str
    reason: str
    events: int
    blocks_released: int


class Stat(NamedTuple):
    """Where a field of ``EngineStats`` is shown: as a series of ``/metrics``, and under ``shown``
    in ``/v1/kv/stats`` and the page's events.

    ``vllm``: vLLM has the series too. ``for_page``: only the page's events have it.
    """

    metric: str = ""
    help: str = ""
    counts: bool = False
    shown: str = ""
    vllm: bool = False
    for_page: bool = False


def _gauge(metric: str = "", help: str = "", **where: Any) -> Any:
    return field(default=0, metadata={"stat": Stat(metric, help, **where)})


def _counter(metric: str = "", help: str = "", **where: Any) -> Any:
    return field(default=0, metadata={"stat": Stat(metric, help, counts=True, **where)})


@dataclass(slots=True)
class EngineStats:
    """The engine's state now, and its counters since start (``..._total``).

    Scheduler and core count in one of these; what is sent is a copy that has the state, too.

    ``num_running``, ``num_waiting`` and ``requests`` are about sequences: a request with ``n=3``
    counts three times. ``blocks_cached`` blocks are held only by the prefix cache and by
    continuations, and are freed when needed. Tokens and bytes are sums over running sequences;
    bytes are those of all ranks. ``iterations[i]`` counts the steps with at most
    ``ITERATION_TOKENS[i]`` tokens and more than the bound before; the last item counts larger
    steps.
    """

    num_running: int = _gauge(
        "num_requests_running", "Requests in the batch", shown="num_running", vllm=True
    )
    num_waiting: int = _gauge(
        "num_requests_waiting", "Requests in the queue", shown="num_waiting", vllm=True
    )
    blocks_total: int = _gauge(shown="blocks_total")
    blocks_free: int = _gauge(shown="blocks_free")
    blocks_cached: int = _gauge(shown="blocks_cached")
    bytes_total: int = _gauge(
        "kv_pool_bytes", "Bytes of all blocks, as --kv-cache-dtype stores them", shown="bytes_total"
    )
    bytes_held: int = _gauge(
        "kv_held_bytes", "Bytes of blocks that requests hold", shown="bytes_held"
    )
    window_bytes: int = _gauge(
        "kv_window_bytes",
        "Bytes of blocks that running requests hold in layers with sliding windows",
    )
    tokens_logical: int = _gauge(
        "kv_tokens_logical", "Tokens of running requests", shown="tokens_logical"
    )
    tokens_held: int = _gauge(
        "kv_tokens_held",
        "Those of them that the cache still holds, mean over layers and KV heads",
        shown="tokens_held",
    )
    prompt_tokens_total: int = _counter(
        "prompt_tokens",
        "Prompt tokens of requests that arrived",
        shown="prompt_tokens_total",
        vllm=True,
        for_page=True,
    )
    generation_tokens_total: int = _counter(
        "generation_tokens",
        "Tokens made",
        shown="generation_tokens_total",
        vllm=True,
        for_page=True,
    )
    preemptions_total: int = _counter(
        "num_preemptions",
        "Times a running sequence was preempted",
        shown="preemptions_total",
        vllm=True,
    )
    swaps_total: int = _counter(
        "kv_swaps",
        "Preempted sequences whose blocks went to host memory",
        shown="swaps_total",
        for_page=True,
    )
    compactions_total: int = _counter(shown="compactions_total")
    early_compactions_total: int = 0
    blocks_released_total: int = _counter(shown="blocks_released_total")
    tokens_evicted_total: int = _counter(
        "kv_tokens_evicted", "Tokens that compactions dropped", shown="tokens_evicted_total"
    )
    compaction_seconds_total: float = _counter(
        "kv_compaction_seconds", "Seconds that compactions took"
    )
    steps_total: int = _counter(shown="steps_total", for_page=True)
    scoring_workspace_bytes: int = _gauge(
        "kv_scoring_workspace_bytes", "Most bytes that scoring needs outside the pool"
    )
    rest_entries: int = _gauge(
        "kv_rest_entries", "Entries of running requests that events left in fewer bits"
    )
    coded_entries: int = _gauge(
        "kv_coded_entries", "Entries of running requests that are held as codes"
    )
    codebook_entries: int = _gauge(
        "kv_codebook_entries", "Codebook vectors that stand for their keys and values"
    )
    state_bytes: int = _gauge("kv_state_bytes", "Bytes of the states of running requests")
    kept_state_bytes: int = _gauge("kv_kept_state_bytes", "Bytes of states kept for later prompts")
    compaction_counts: tuple[CompactionCounts, ...] = ()
    continuations: int = _gauge(
        "kv_continuations", "Rows kept for conversations that go on", shown="continuations.count"
    )
    continuation_blocks: int = _gauge(
        "kv_continuation_blocks",
        "Blocks that continuations hold, shared ones included",
        shown="continuations.blocks",
    )
    hosted_continuations: int = _gauge(
        "kv_hosted_continuations",
        "Continuations that have moved to host memory",
        shown="continuations.in_host_memory",
    )
    resumed_total: int = _counter(
        "kv_resumed", "Sequences that went on from a kept row", shown="continuations.resumed_total"
    )
    resumed_from_host_total: int = _counter(
        "kv_resumed_from_host",
        "Sequences that resumed a continuation from host memory",
        shown="continuations.resumed_from_host_total",
    )
    resumed_tokens_total: int = _counter(
        "kv_resumed_tokens",
        "Tokens of the continuations that sequences resumed",
        shown="continuations.resumed_tokens_total",
    )
    continuation_misses: tuple[tuple[str, int], ...] = ()
    drafts_total: int = _counter("spec_decode_num_drafts", "Chunks of guesses", vllm=True)
    draft_tokens_total: int = _counter(
        "spec_decode_num_draft_tokens",
        "Tokens that were guessed and verified",
        shown="speculation.drafted_tokens_total",
        vllm=True,
    )
    accepted_tokens_total: int = _counter(
        "spec_decode_num_accepted_tokens",
        "Guessed tokens that were right",
        shown="speculation.accepted_tokens_total",
        vllm=True,
    )
    iterations: tuple[int, ...] = ()
    iteration_tokens_total: int = 0
    requests: tuple[RequestStats, ...] = ()

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's blocks in use, 0 to 1; ``blocks_cached`` count as free."""
        if not self.blocks_total:
            return 0.0
        return 1.0 - (self.blocks_free + self.blocks_cached) / self.blocks_total


STATS: dict[str, Stat] = {
    each.name: each.metadata["stat"] for each in fields(EngineStats) if "stat" in each.metadata
}
"""Where each field is shown."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """What each block of the pool is held for, and the engine's ``stats`` at the same moment.

    ``cells`` is run-length encoded: ``owner, count, owner, count, ...``. A cell stands for
    ``blocks_per_cell`` blocks and shows the owner of the first. Owners: 0 free, 1 prefix cache or
    continuations, 2 logged queries, 3 codes, 4 + i the sequence ``stats.requests[i]``, which has
    ``log_blocks[i]`` blocks of logged queries. ``time`` is in seconds since the epoch.
    """

    time: float
    stats: EngineStats
    blocks_per_cell: int
    cells: list[int]
    log_blocks: list[int]
