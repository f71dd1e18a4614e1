"""What the engine returns: outputs of requests and of their choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar


class SaysWhatIsAbsent:
    """Names vLLM's attributes that are not here in the ``AttributeError``."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from kvserve.absent import ATTRIBUTES, refusal

            if name in ATTRIBUTES:
                raise AttributeError(refusal(name, ATTRIBUTES[name]))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token, before temperature, filters and penalties."""

    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """1 is the most probable token."""
    decoded_token: str = ""
    """The token as text."""


@dataclass(frozen=True, slots=True)
class KVCacheDetails:
    """What the policy did to the cache of one request (``usage.kv_cache_details``).

    A choice is counted when it ends: until the first one has ended, ``policy`` is ``none`` and all
    counts are 0. With ``n`` above 1 the counts are sums over the choices, ``peak_blocks`` too.
    """

    # What the OpenAPI document takes from here: fields with their docstrings, all always there.
    __pydantic_config__: ClassVar = {
        "use_attribute_docstrings": True,
        "json_schema_serialization_defaults_required": True,
    }

    policy: str = "none"
    """The policy's name; none is the full cache."""
    logical_tokens: int = 0
    """Tokens of prompt and answer that the model has read."""
    held_tokens: int = 0
    """Tokens that the cache still has: the mean over layers and KV heads, rounded up."""
    held_entries: int = 0
    """Entries that the cache still has: the sum over layers and KV heads."""
    evicted_tokens: int = 0
    """Tokens that the policy dropped: ``logical_tokens - held_tokens``."""
    compactions: int = 0
    """Compression events; 0: the policy never had to act."""
    blocks_released: int = 0
    """Blocks that went back to the pool while the request ran."""
    peak_blocks: int = 0
    """Most blocks that the request had at once."""
    held_bytes: int = 0
    """Bytes of all blocks that hold its entries, and of what stands for dropped ones."""
    window_bytes: int = 0
    """Those of them that belong to layers with sliding windows, which no policy compresses."""
    log_bytes: int = 0
    """Bytes of the blocks that hold its logged queries, and of scores kept for its next event."""
    rest_entries: int = 0
    """Those of them that events left in fewer bits (``rest_bits``)."""
    state_bytes: int = 0
    """Bytes of the states of layers that keep one, which no length changes."""
    coded_entries: int = 0
    """Entries that are held as codes, which only ``spindlekv`` does."""
    codebook_entries: int = 0
    """Codebook vectors for the keys and values of coded entries."""
    resumed_tokens: int = 0
    """Tokens whose entries were taken over from an earlier turn (``--continuations on``)."""
    entry_table: str = ""
    """The name of the model's table that entries in few bits are written by (``--kv-cache-dtype``);
    empty: by none."""
    remainder_entries: int = 0
    """Entries that stand for dropped ones, one for each layer and KV head; they are not counted in
    ``held_entries``."""


@dataclass(frozen=True, slots=True)
class SpeculationDetails:
    """How many tokens of one request were guessed (``usage.speculation``); with ``n`` above 1,
    sums over the choices that have ended."""

    __pydantic_config__: ClassVar = KVCacheDetails.__pydantic_config__

    drafted_tokens: int = 0
    """Tokens that were guessed and verified."""
    accepted_tokens: int = 0
    """Those of them that were right, so that they took no step of their own."""
    refused: str | None = None
    """Why nothing was guessed: a setting of the request that each token depends on, or its policy;
    ``null`` if its tokens may be guessed."""

    def plus(self, other: SpeculationDetails | None) -> SpeculationDetails:
        """The sum of both, if there is another."""
        if other is None:
            return self
        drafted = self.drafted_tokens + other.drafted_tokens
        accepted = self.accepted_tokens + other.accepted_tokens
        return SpeculationDetails(drafted, accepted, self.refused)


@dataclass(frozen=True, slots=True)
class Compaction:
    """One compression event of a request. Token counts are means over layers and KV heads."""

    reason: str
    """``due``, or ``pressure`` if it came early because blocks ran out."""
    time: float
    """Seconds since the epoch."""
    evicted_tokens: int
    """Tokens that left the cache."""
    held_tokens: int
    """Tokens that are left in it."""


@dataclass(frozen=True, slots=True)
class KVTraceEvent:
    """One event of a request with ``kv_trace``: which positions left the cache."""

    reason: str
    """``due`` or ``pressure``; ``start``: the cache is empty, because the request begins or because
    it was preempted and begins again."""
    time: float
    """Seconds since the epoch."""
    seen: int
    """How many positions the cache had received when the event came."""
    dropped: list[list[list[int]]]
    """``dropped[layer][kv_head]``: runs ``first, end, first, end, ...`` of dropped positions,
    ``end`` excluded."""
    blocks_released: int = 0
    """Blocks that went back to the pool."""
    queries: int = 0
    """Queries that scored the entries; 0: the policy uses no queries."""


@dataclass(slots=True)
class CompletionOutput(SaysWhatIsAbsent):
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
    """For each token a map by token id, of the most probable tokens and of the one drawn; ``None``
    unless the request set ``logprobs``."""
    text_offsets: list[int] | None = None
    """For each token where its text begins; a token that is a part of a character begins where that
    does. ``None`` unless the request set ``logprobs``."""
    finish_reason: str | None = None
    """``stop``, ``length`` (``max_tokens``, the context, or a full pool), ``abort`` or ``error``;
    ``None`` while it runs."""
    stop_reason: int | str | None = None
    """The stop string or the stop token that ended it, if one did."""
    kv_trace: list[KVTraceEvent] | None = None
    """Events and the positions that they dropped; the first has reason ``start``. ``None`` unless
    the request set ``kv_trace``."""

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; ``None`` without ``logprobs``."""
        if self.logprobs is None:
            return None
        steps = zip(self.token_ids, self.logprobs, strict=False)
        return sum(entry[token].logprob for token, entry in steps)

    @property
    def finished(self) -> bool:
        """Whether ``finish_reason`` is known."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput(SaysWhatIsAbsent):
    """One request: its choices so far, and what its cache held.

    ``LLM.generate`` returns finished outputs. ``AsyncEngine.generate`` yields the same object after
    each step that changed it. Example: ``output.outputs[0].text``,
    ``output.kv_cache_details.held_tokens``.
    """

    request_id: str
    """The id of the request."""
    prompt: str | None
    """The prompt's text, of a conversation what the chat template makes of it; ``None`` if it was
    given as token ids."""
    prompt_token_ids: list[int]
    """The prompt's tokens."""
    outputs: list[CompletionOutput]
    """The ``n`` choices, in the order of ``index``."""
    finished: bool = False
    """Whether every choice has ended."""
    kv_cache_details: KVCacheDetails = field(default_factory=KVCacheDetails)
    """What the policy did to the cache."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache or in a continuation; 0 until choice 0 ends."""
    metrics: RequestMetrics | None = None
    """When the request arrived, got its first token, and ended."""
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """A map by token id for each prompt token, ``None`` for the first; ``None`` unless the request
    set ``prompt_logprobs``."""
    compactions: list[Compaction] = field(default_factory=list)
    """The events so far, of all choices."""
    engine: str = "0"
    """The replica that runs the request."""
    speculation: SpeculationDetails | None = None
    """How many tokens were guessed; ``None`` until a choice ends, and without
    ``speculative_config``."""


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds since the epoch, taken where its outputs are collected.

    Only ``queued_seconds`` is a duration; the engine measures it, and it is 0 until choice 0 ends.
    """

    arrival_time: float
    """When the request was sent to the engine."""
    first_token_time: float | None = None
    """When the first token came; ``None`` before."""
    finished_time: float | None = None
    """When the request ended; ``None`` before."""
    queued_seconds: float = 0.0
    """Seconds that choice 0 waited until it was first admitted."""
