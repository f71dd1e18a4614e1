"""Messages between the engine core and its client, in one process or two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvserve.outputs import Compaction, KVCacheDetails, KVTraceEvent, Logprob, SpeculationDetails
from kvserve.sampling_params import StructuredOutput
from kvserve.stats import EngineStats, PoolView

Row = tuple[str, str, str]
"""Of the start-up table: feature, state, why."""
INTERNAL_ERROR = "an internal error ended this request; the server's log has the details"


@dataclass(frozen=True, slots=True)
class NewSequence:
    """One branch of a request, tokenized. ``seq_id`` is the sender's and must be unused."""

    seq_id: int
    request_id: str
    token_ids: list[int]
    max_tokens: int | None
    stop_token_ids: list[int]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    branch: int = 0
    min_tokens: int = 0
    logprobs: int | None = None
    kv_policy: str | dict[str, Any] | None = None
    priority: int = 0
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    structured_output: StructuredOutput | None = None
    thinking_start: int | None = None
    thinking_end: int | None = None
    thinking_token_budget: int | None = None
    kv_trace: bool = False
    cache_salt: str | None = None
    kv_resume: bool = True
    speculation: bool = True
    client: str = ""
    num_answered: int = 0
    """So many of ``token_ids`` are its answer so far: they are computed at the speed of a prompt,
    with its policy's events where they would have been."""

    @property
    def has_rules(self) -> bool:
        """Whether some tokens' logits are changed (``sampling/logit_rules.py``)."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        named = self.logit_bias or self.allowed_token_ids or self.bad_words
        return bool(named) or penalties != (0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Branches:
    """All branches of a request: the first, and the others' ids. What is long is sent once."""

    first: NewSequence
    seq_ids: list[int]

    def each(self) -> Iterator[NewSequence]:
        """The branches; they share their lists. The first one has the prompt's scores."""
        yield self.first
        for branch, seq_id in enumerate(self.seq_ids, 1):
            yield replace(self.first, seq_id=seq_id, branch=branch, prompt_logprobs=None)


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """How a sequence ended: ``reason`` is stop, length or abort.

    ``num_cached_tokens`` counts its tokens that came from the prefix cache or a continuation.
    """

    seq_id: int
    reason: str
    stop_token: int | None
    num_cached_tokens: int
    details: KVCacheDetails
    queued_seconds: float = 0.0
    speculation: SpeculationDetails | None = None


@dataclass(frozen=True, slots=True)
class RefusedSequence:
    """A sequence that was refused or ended by an error, and why; see ``RequestError``."""

    seq_id: int
    message: str
    param: str | None
    code: str | None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Prompt tokens ``[start, start + n)`` of a sequence under the model, and ``count`` likelier.

    Arrays of int32 and float32: n tokens, their log-probabilities and ranks; n times ``count`` of
    the likeliest tokens and their log-probabilities. ``frontend.scored_prompt`` reads them.
    """

    seq_id: int
    start: int
    count: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes


@dataclass(frozen=True, slots=True)
class PolicyOffer:
    """A policy with arguments that do something in this engine; ``refusal``: why it cannot run."""

    name: str
    args: dict[str, Any]
    refusal: str | None


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """One step's outputs; ``seq_ids``, ``token_ids`` and ``logprobs`` are aligned lists.

    ``compactions`` and ``traced`` pair each event with its sequence id. ``stats`` comes only with
    some steps, ``pool`` only while a client watches, ``offers`` when a client asks.
    """

    seq_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finished: list[FinishedSequence] = field(default_factory=list)
    refused: list[RefusedSequence] = field(default_factory=list)
    stats: EngineStats | None = None
    compactions: list[tuple[int, Compaction]] = field(default_factory=list)
    traced: list[tuple[int, KVTraceEvent]] = field(default_factory=list)
    pool: PoolView | None = None
    offers: list[PolicyOffer] | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the core resolved at start; ``summary`` is the start-up table, for servers.

    ``token_bytes`` are those of one token's keys and values, in all layers and KV heads.
    """

    model_path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    policy_name: str
    block_size: int
    num_blocks: int
    default_sampling: dict[str, Any]
    summary: list[Row] = field(default_factory=list)
    token_bytes: int = 0
    prefix_caching: bool = True


def policy_spec(value: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """A request's ``kv_policy`` in the form that messages carry."""
    return dict(value) if isinstance(value, Mapping) else value
