"""What the engine gives back: per request, per choice, and about itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """How probable a token was, before temperature, filters and penalties."""

    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """1 is the most probable token."""
    decoded_token: str = ""
    """The token as text."""


@dataclass(frozen=True, slots=True)
class KVCacheDetails:
    """What the policy did to the cache of one request (``usage.kv_cache_details``).

    Counts are those at the request's end, unless a field says otherwise. The choices of one request
    (``n`` above 1) are summed.
    """

    policy: str = "none"
    """The policy's name; none is the full cache."""
    logical_tokens: int = 0
    """Tokens of prompt and answer that the model has read."""
    held_tokens: int = 0
    """Tokens that the cache still has: the mean over layers and KV heads, rounded up."""
    held_entries: int = 0
    """The same as a sum over layers and KV heads."""
    evicted_tokens: int = 0
    """``logical_tokens - held_tokens``."""
    compactions: int = 0
    """Compression events so far; 0: the policy never had to act."""
    blocks_released: int = 0
    """Blocks that went back to the pool while the request ran."""
    peak_blocks: int = 0
    """Most blocks that the request had at once."""
    held_bytes: int = 0
    """Bytes of all blocks that hold its entries."""
    log_bytes: int = 0
    """Bytes of the blocks that hold its logged queries."""
    coded_entries: int = 0
    """Entries that are held as codes (``spindlekv``)."""
    codebook_entries: int = 0
    """Codebook vectors that stand for their keys and values."""
    resumed_tokens: int = 0
    """Tokens taken over from what an earlier turn left in the cache."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """One compression event of a request. Token counts are means over layers and KV heads."""

    reason: str
    """``due``, or ``pressure`` where it came early because blocks ran out."""
    time: float
    """Seconds since the epoch."""
    evicted_tokens: int
    """Tokens that left the cache."""
    held_tokens: int
    """Tokens that are left in it."""


@dataclass(frozen=True, slots=True)
class KVTraceEvent:
    """One event of a request with ``kv_trace``: which of its positions left the cache."""

    reason: str
    """``due`` or ``pressure``; ``start``: the cache is empty, because the request begins or because
    it was preempted and begins again."""
    time: float
    """Seconds since the epoch."""
    seen: int
    """How many positions had entered the cache when the event came."""
    dropped: list[list[list[int]]]
    """``dropped[layer][kv_head]``: runs ``first, end, first, end, ...`` of dropped positions,
    ``end`` excluded."""
    blocks_released: int = 0
    """Blocks that went back to the pool."""
    queries: int = 0
    """Queries that scored the event; 0: keys alone."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request. It grows from step to step while the request runs.

    Example: ``output.outputs[0].text`` is the answer, ``len(output.outputs[0].token_ids)`` its
    length in tokens.
    """

    index: int
    """0 to ``n - 1``."""
    text: str = ""
    """The text so far."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens so far."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token the most probable ones by token id, where ``logprobs`` was asked for."""
    finish_reason: str | None = None
    """``stop``, ``length`` (``max_tokens``, the context, or a full pool), ``abort`` or ``error``;
    ``None`` while it runs."""
    stop_reason: int | str | None = None
    """The stop string or the stop token that ended it, if one did."""
    kv_trace: list[KVTraceEvent] | None = None
    """Events with the positions they dropped, where ``kv_trace`` was asked for. The first one is a
    start."""

    @property
    def finished(self) -> bool:
        """Whether ``finish_reason`` is known."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One request: its choices so far, and what its cache held.

    ``LLM.generate`` returns finished ones, ``AsyncEngine.generate`` yields the same object after
    each step that changed it. Example: ``output.outputs[0].text``,
    ``output.kv_cache_details.held_tokens``.
    """

    request_id: str
    """The id that it was given."""
    prompt: str | None
    """The prompt's text; ``None`` where it came as token ids."""
    prompt_token_ids: list[int]
    """The prompt's tokens."""
    outputs: list[CompletionOutput]
    """One for each of ``n`` choices, by ``index``."""
    finished: bool = False
    """Whether every choice has ended."""
    kv_cache_details: KVCacheDetails = field(default_factory=KVCacheDetails)
    """What the policy did."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache, or from what an earlier turn left."""
    metrics: RequestMetrics | None = None
    """When it arrived, began and ended."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One for each prompt token, where asked for. The first is ``None``: nothing precedes it."""
    compactions: list[Compaction] = field(default_factory=list)
    """Its events so far, of all choices."""
    engine: str = "0"
    """The replica that runs it."""


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds since the epoch, as the engine's client saw them."""

    arrival_time: float
    """When it was sent to the engine."""
    first_token_time: float | None = None
    """When its first token came; ``None`` before."""
    finished_time: float | None = None
    """When it ended; ``None`` before."""
    queued_seconds: float = 0.0
    """Seconds that it waited before the engine first worked on it."""


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
"""Upper bounds of the step sizes that ``EngineStats.iterations`` counts, as in vLLM."""


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

    ``blocks_cached`` are held only by the prefix cache and continuations, and are freed when
    needed. ``continuations`` hold ``continuation_blocks``, shared ones included;
    ``hosted_continuations`` more are in host memory. Of the sequences that could have continued
    from one, ``resumed_total`` did, from ``resumed_tokens_total`` tokens, and of these
    ``resumed_from_host_total`` from host memory; ``continuation_misses`` counts the others by
    cause. The pool has ``bytes_total`` on all ranks;
    requests hold ``bytes_held`` of them. ``swaps_total`` of the preemptions went to host memory.
    ``early_compactions_total`` of the compactions came early, because blocks ran out;
    ``skipped_compactions_total`` more were left out, because they would not have paid. Of the
    entries of running requests ``coded_entries`` are held as codes, with ``codebook_entries``
    vectors for their keys and values. ``iterations[i]`` counts the steps with at most
    ``ITERATION_TOKENS[i]`` tokens and more than the bound before; the last counts larger ones.
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
    hosted_continuations: int = 0
    resumed_total: int = 0
    resumed_from_host_total: int = 0
    resumed_tokens_total: int = 0
    continuation_misses: tuple[tuple[str, int], ...] = ()
    iterations: tuple[int, ...] = ()
    iteration_tokens_total: int = 0
    requests: tuple[RequestStats, ...] = ()

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's blocks in use, 0 to 1; ``blocks_cached`` count as free."""
        if not self.blocks_total:
            return 0.0
        return 1.0 - (self.blocks_free + self.blocks_cached) / self.blocks_total


@dataclass(frozen=True, slots=True)
class PoolView:
    """What the blocks are held for, and the engine's ``stats`` at the same moment.

    ``cells`` are runs of equal cells over the pool: ``owner, count, owner, count, ...``. A cell
    stands for ``blocks_per_cell`` blocks and shows the owner of the first. Owners: 0 free, 1 prefix
    cache, 2 logged queries, 3 codes, 4 + i the request ``stats.requests[i]``, which logs queries in
    ``log_blocks[i]``.
    """

    time: float
    stats: EngineStats
    blocks_per_cell: int
    cells: list[int]
    log_blocks: list[int]
