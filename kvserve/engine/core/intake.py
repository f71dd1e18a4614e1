"""Check new requests, and build the scheduler's sequences from them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvserve.engine.core.build import BuiltEngine
from kvserve.engine.messages import NewSequence
from kvserve.engine.policies.base import Policy
from kvserve.engine.sampling.sampler import PromptScoring, RowSampling
from kvserve.late import Late, Made
from kvserve.log import RequestError, too_long
from kvserve.scheduler.column_hash import salted_seed
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.triggers.trigger import NO_EVENT, Trigger

if TYPE_CHECKING:
    from kvserve.engine.core.kv_trace import KVTracer
    from kvserve.engine.core.request_policies import RequestPolicies
    from kvserve.engine.sampling.grammar import GrammarCompiler
    from kvserve.engine.sampling.grammar_backends import Matcher
    from kvserve.engine.sampling.logit_rules import RowRules

_check_exact = Late("engine.core.refusals:check_exact")
_check_whole = Late("engine.core.refusals:check_whole")
_speculation_refusal = Late("engine.core.refusals:speculation_refusal")
_continuation_refusal = Late("engine.runner.policy_fit:continuation_refusal")
_request_policies = Late("engine.core.request_policies:RequestPolicies")
_rules_of = Late("engine.sampling.logit_rules:RowRules.of")


class Intake:
    """Builds sequences from what clients send; ``RequestError`` says what is wrong with it."""

    def __init__(
        self, built: BuiltEngine, grammars: Made[GrammarCompiler], tracer: Made[KVTracer]
    ) -> None:
        self._config = config = built.plan.config
        self._info = built.info
        self._scheduler = built.scheduler
        self._spec = built.plan.spec
        self.policies: Made[RequestPolicies] = Made(lambda: _request_policies(built))
        self._own_policy = built.plan.policy
        self._grammars = grammars
        self._tracer = tracer
        self._rules_of: tuple[str, RowRules | None] = "", None
        self._seeds = np.random.default_rng(config.model.seed)

    def sequence(
        self, new: NewSequence, others: Iterable[Sequence], matcher: Matcher | None
    ) -> Sequence:
        """The sequence for ``new``, or ``RequestError``.

        ``others`` are the sequences in the engine; ``matcher`` is the grammar of ``new`` if it is
        compiled already.
        """
        self._check_prompt(new)
        known, limit = len(new.token_ids), self._info.max_model_len
        prompt = known - new.num_answered
        self._check_tokens(new)
        if new.priority and self._config.scheduler.scheduling_policy != "priority":
            raise RequestError(
                "priority needs a server started with --scheduling-policy priority",
                param="priority",
            )
        policy, policy_id = self._own_policy, 0
        if new.kv_policy is not None:
            policy = self.policies().resolve(new.kv_policy)
            policy_id = self.policies().id_of(policy, others)
        trigger = policy.event_trigger
        prunes = trigger.prunes_prompt(prompt)
        if prunes:
            _check_whole(prompt, policy, self._config.scheduler.max_num_batched_tokens)
        if new.prompt_logprobs is not None:
            _check_exact(prompt, policy, prunes)
        max_len = limit if new.max_tokens is None else known + new.max_tokens
        self._check_fits(prompt, max_len, trigger, policy.name)
        if new.kv_trace:
            self._tracer().check(max_len)
        sequence = Sequence(
            seq_id=new.seq_id,
            token_ids=np.array(new.token_ids, np.int32),
            num_prompt_tokens=prompt,
            max_len=max_len,
            stop_token_ids=tuple(new.stop_token_ids),
            policy_id=policy_id,
            trigger=trigger,
            event_kind=policy.demands.event_kind,
            leaves_remainder=policy.demands.leaves != "off",
            sampling=self._row_sampling(new, prompt, matcher),
            priority=new.priority,
            client=new.client,
            num_shareable=0 if prunes else self._spec.num_shareable(prompt),
        )
        if new.cache_salt is not None:
            sequence.cache_seed = salted_seed(new.cache_salt)
        if self._config.cache.continuations == "on" and policy.name != "none":
            self._continue(sequence, new, policy)
        if self._scheduler.speculation is not None:
            sequence.guesses.refused = _speculation_refusal(new, policy)
            sequence.guesses.start = 0 if sequence.guesses.refused is None else NO_EVENT
        if new.prompt_logprobs is not None:
            # Tokens found in the prefix cache have no logits. A random first hash finds none.
            sequence.column_hashes = [os.urandom(16)]
        return sequence

    def _continue(self, sequence: Sequence, new: NewSequence, policy: Policy) -> None:
        """Set whether the sequence leaves and takes continuations."""
        from kvserve.scheduler.messages.continuation import REFUSED, UNSUPPORTED

        if new.prompt_logprobs is not None or _continuation_refusal(policy, self._spec):
            sequence.talk.refuses = UNSUPPORTED
            return
        sequence.talk.continues_as = policy
        if new.kv_trace:
            sequence.talk.refuses = UNSUPPORTED  # a trace follows positions from the first one on
        elif not new.kv_resume:
            sequence.talk.refuses = REFUSED

    def _check_prompt(self, new: NewSequence) -> None:
        prompt, limit = len(new.token_ids), self._info.max_model_len
        if not prompt:
            raise RequestError("prompt must not be empty", param="prompt")
        if prompt >= limit:
            said = f"this model's context is {limit} tokens, and one must be left to generate"
            raise too_long(prompt, limit, said, "prompt")
        most = limit - prompt
        if new.max_tokens is not None and new.max_tokens > most:
            said = (
                f"max_tokens={new.max_tokens} does not fit: the context is {limit} tokens and the "
                f"prompt has {prompt}; ask for at most {most}"
            )
            raise too_long(prompt + new.max_tokens, limit, said, "max_tokens")

    def _check_fits(self, prompt: int, max_len: int, trigger: Trigger, policy_name: str) -> None:
        wanted = self._scheduler.blocks_at_least(prompt, max_len, trigger)
        capacity = self._scheduler.pool.capacity
        if wanted > capacity:
            raise RequestError(
                f"a prompt of {prompt} tokens under policy {policy_name} needs {wanted} KV blocks "
                f"at once and the pool has {capacity}; raise --kv-cache-memory or "
                "--num-gpu-blocks-override",
                param="prompt",
                code="kv_cache_too_small",
            )

    def _check_tokens(self, new: NewSequence) -> None:
        """Check every token id that a request brings, once for all its branches: they index
        tensors of the device."""
        if new.branch and new.request_id == self._rules_of[0]:
            return
        marks = [mark for mark in (new.thinking_start, new.thinking_end) if mark is not None]
        named: dict[str, Collection[int] | None] = {
            "prompt": new.token_ids,
            "stop_token_ids": new.stop_token_ids,
            "logit_bias": new.logit_bias,
            "allowed_token_ids": new.allowed_token_ids,
            "bad_words": [token for word in new.bad_words for token in word],
            "thinking_end": marks,
        }
        for name, ids in named.items():
            if ids and not 0 <= min(ids) <= max(ids) < self._info.vocab_size:
                raise RequestError(
                    f"{name} holds a token id outside [0, {self._info.vocab_size})", param=name
                )

    def _row_sampling(self, new: NewSequence, prompt: int, matcher: Matcher | None) -> RowSampling:
        if not new.branch or new.request_id != self._rules_of[0]:
            # A request's branches come one after another, and share its rules.
            self._rules_of = new.request_id, _rules_of(new) if new.has_rules else None
        seed = int(self._seeds.integers(2**62)) if new.seed is None else new.seed
        branch = (new.branch * 0x9E3779B97F4A7C15) % 2**63
        return RowSampling(
            temperature=new.temperature,
            top_p=new.top_p,
            top_k=max(new.top_k, 0),
            min_p=new.min_p,
            seed=seed ^ branch,
            min_len=prompt + new.min_tokens,
            logprobs=new.logprobs,
            rules=self._rules_of[1],
            think_end=-1 if new.thinking_token_budget is None else new.thinking_end or 0,
            think_start=-1 if new.thinking_start is None else new.thinking_start,
            think_limit=prompt + (new.thinking_token_budget or 0),
            prompt=PromptScoring.of(new),
            grammar=self._grammars().follow(new, matcher) if new.structured_output else None,
        )
