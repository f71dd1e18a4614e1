"""What requests are refused that ask for more than plain tokens."""

from __future__ import annotations

from kvserve.engine.messages import NewSequence
from kvserve.engine.policies.base import Policy
from kvserve.log import RequestError
from kvserve.scheduler.step.admission import first_event


def check_whole(prompt: int, policy: Policy, limit: int) -> None:
    """Refuse a prompt longer than a step of ``limit`` tokens: chunks need layers that compute the
    same tokens."""
    if prompt > limit:
        raise RequestError(
            f"policy {policy.name} prunes a prompt between layers and cannot compute it in "
            f"chunks: this one has {prompt} tokens and a step takes {limit}; raise "
            "--max-num-batched-tokens or choose another policy",
            param="prompt",
            code="policy_not_allowed",
        )


def speculation_refusal(new: NewSequence, policy: Policy) -> str | None:
    """Why a sequence's next tokens may not be guessed, if so: what a token may be depends on the
    one before it by more than its position, or its events are due by the engine's steps."""
    if policy.event_trigger.counts_steps:
        return "kv_policy"
    for name, used in (
        ("speculation", not new.speculation),
        ("presence_penalty", new.presence_penalty != 0.0),
        ("frequency_penalty", new.frequency_penalty != 0.0),
        ("repetition_penalty", new.repetition_penalty != 1.0),
        ("bad_words", bool(new.bad_words)),
        ("thinking_token_budget", new.thinking_token_budget is not None),
        ("" if new.structured_output is None else new.structured_output.field, True),
    ):
        if used and name:
            return name
    return None


def check_exact(num_prompt: int, policy: Policy, prunes: bool) -> None:
    """Refuse prompt log-probabilities if an event comes before the prompt's end.

    Each prompt token is scored with the whole prompt before it in the cache.
    """
    due, _ = first_event(num_prompt, policy.event_trigger)
    if prunes or due < num_prompt:
        raise RequestError(
            f"log-probabilities of the prompt need all of it in the cache, and policy "
            f'{policy.name} compresses this one before its end; send "kv_policy": "none"',
            param="kv_policy",
            code="policy_not_allowed",
        )
