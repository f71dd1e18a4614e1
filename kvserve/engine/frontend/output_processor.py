"""Requests as their clients see them: branches gathered, tokens turned into text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

from kvserve.engine.frontend.detokenizer import IncrementalDetokenizer, StopStrings
from kvserve.engine.frontend.tokenizer import Tokenizer, tokenize
from kvserve.engine.messages import (
    INTERNAL_ERROR,
    Branches,
    FinishedSequence,
    NewSequence,
    StepOutputs,
    policy_spec,
)
from kvserve.log import RequestError, logger
from kvserve.outputs import CompletionOutput, KVCacheDetails, Logprob, RequestMetrics, RequestOutput
from kvserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvserve.engine.frontend.scored_prompt import ScoredPrompt

_ALIKE = {f.name for f in fields(NewSequence)} & {f.name for f in fields(SamplingParams)}


@dataclass(slots=True)
class _Branch:
    request: RequestOutput
    choice: CompletionOutput
    params: SamplingParams
    detokenizer: IncrementalDetokenizer | None

    @property
    def metrics(self) -> RequestMetrics:
        assert self.request.metrics is not None
        return self.request.metrics


class OutputProcessor:
    """Hands out sequence ids, and folds the core's step outputs into ``RequestOutput`` objects."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._branches: dict[int, _Branch] = {}
        self._by_request: dict[str, list[int]] = {}
        self._next_id = 0

    def add(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        text: str | None = None,
    ) -> tuple[RequestOutput, Branches]:
        """Register a request; the branches returned are for the core.

        ``text`` is what a prompt of token ids was made of, if that is known.
        """
        tokenizer = self._tokenizer
        if tokenizer is None and params.stop:
            raise RequestError(
                "stop: there is no tokenizer (skip_tokenizer_init), so answers have no text; send "
                "stop_token_ids",
                param="stop",
            )
        own, token_ids = tokenize(tokenizer, prompt)
        text = own if text is None else text
        request = RequestOutput(
            request_id,
            text,
            token_ids,
            [CompletionOutput(index) for index in range(params.n)],
            metrics=RequestMetrics(time.time()),
            prompt_logprobs=None if params.prompt_logprobs is None else self._scored_prompt(),
        )
        first = self._sequence(request_id, token_ids, params)
        stops, skip = None, params.skip_special_tokens
        if tokenizer is not None:  # once for all choices
            stops = StopStrings(tokenizer, params.stop_strings, skip_special=skip)
        seq_ids = list(range(self._next_id, self._next_id + params.n))
        self._next_id += params.n
        for seq_id, choice in zip(seq_ids, request.outputs, strict=True):
            choice.logprobs = None if params.logprobs is None else []
            choice.text_offsets = None if params.logprobs is None else []
            choice.kv_trace = [] if params.kv_trace else None
            detokenizer = None
            if tokenizer is not None and stops is not None:
                including = params.include_stop_str_in_output
                detokenizer = IncrementalDetokenizer(
                    tokenizer, stops, skip_special_tokens=skip, include_stop=including
                )
            self._branches[seq_id] = _Branch(request, choice, params, detokenizer)
        self._by_request[request_id] = seq_ids
        return request, Branches(first, seq_ids[1:])

    def remove(self, request_id: str) -> list[int]:
        """Forget a request; returns its unfinished sequences, to be aborted."""
        seq_ids = self._by_request.pop(request_id, [])
        return [seq_id for seq_id in seq_ids if self._branches.pop(seq_id, None) is not None]

    def process(
        self, outputs: StepOutputs
    ) -> tuple[list[RequestOutput], list[int], dict[str, RequestError]]:
        """Fold in one step; returns the requests it changed, sequences to abort, and by request
        why one was refused or its text could not be made."""
        ended = {finished.seq_id: finished for finished in outputs.finished}
        changed: dict[str, RequestOutput] = {}
        errors: dict[str, RequestError] = {}
        abort = []
        logprobs = outputs.logprobs or [None] * len(outputs.seq_ids)
        now = time.time()
        for scored in outputs.prompt_logprobs:
            if (branch := self._branches.get(scored.seq_id)) is not None:
                cast("ScoredPrompt", branch.request.prompt_logprobs).take(scored)
        for seq_id, compaction in outputs.compactions:
            branch = self._branches.get(seq_id)
            if branch is not None:
                branch.request.compactions.append(compaction)
        for seq_id, event in outputs.traced:
            branch = self._branches.get(seq_id)
            if branch is not None and branch.choice.kv_trace is not None:
                branch.choice.kv_trace.append(event)
        for seq_id, token, entry in zip(outputs.seq_ids, outputs.token_ids, logprobs, strict=True):
            branch = self._branches.get(seq_id)
            if branch is None or branch.choice.finished:
                continue
            changed[branch.request.request_id] = branch.request
            try:
                self._take(branch, token, entry, ended.get(seq_id))
            except Exception as error:
                errors |= self._fail(seq_id, error)
                abort.append(seq_id)
                continue
            if branch.metrics.first_token_time is None:
                branch.metrics.first_token_time = now
            if branch.detokenizer is not None and branch.detokenizer.stop is not None:
                # The core does not see stop strings: the sequence is aborted to get its counts.
                branch.choice.finish_reason = "stop"
                branch.choice.stop_reason = branch.detokenizer.stop
                if seq_id not in ended:
                    abort.append(seq_id)
        for refused in outputs.refused:
            branch = self._branches.pop(refused.seq_id, None)
            if branch is not None:
                why = RequestError(refused.message, param=refused.param, code=refused.code)
                errors.setdefault(branch.request.request_id, why)
                branch.choice.finish_reason = "error"
                self._close(branch)
                changed[branch.request.request_id] = branch.request
        for seq_id, finished in ended.items():
            branch = self._branches.pop(seq_id, None)
            if branch is not None:
                try:
                    self._end(branch, finished)
                except Exception as error:
                    self._branches[seq_id] = branch
                    errors |= self._fail(seq_id, error)
                changed[branch.request.request_id] = branch.request
        return list(changed.values()), abort, errors

    def _fail(self, seq_id: int, error: Exception) -> dict[str, RequestError]:
        """End a sequence whose text cannot be made; the others go on."""
        branch = self._branches.pop(seq_id)
        request_id = branch.request.request_id
        logger.error("the text of request %s could not be made", request_id, exc_info=error)
        branch.choice.finish_reason = "error"
        self._close(branch)
        return {request_id: RequestError(INTERNAL_ERROR, code="internal_error")}

    def _take(
        self,
        branch: _Branch,
        token: int,
        logprobs: dict[int, Logprob] | None,
        finished: FinishedSequence | None,
    ) -> None:
        branch.choice.token_ids.append(token)
        if branch.choice.text_offsets is not None and branch.detokenizer is not None:
            branch.choice.text_offsets.append(branch.detokenizer.length)
        if branch.choice.logprobs is not None and logprobs is not None:
            # Not by replace, which takes five times as long: there may be 2,000 in a step.
            entries = logprobs.items()
            texts = {i: Logprob(x.logprob, x.rank, self._text(i)) for i, x in entries}
            branch.choice.logprobs.append(texts)
        stopping = finished is not None and finished.stop_token == token
        if branch.detokenizer is None or (
            stopping and not branch.params.include_stop_str_in_output
        ):
            return
        branch.detokenizer.push(token)
        branch.choice.text = branch.detokenizer.text

    def _end(self, branch: _Branch, finished: FinishedSequence) -> None:
        choice, request = branch.choice, branch.request
        if choice.finish_reason is None:
            choice.finish_reason = finished.reason
            if finished.stop_token is not None and finished.stop_token not in self._eos:
                choice.stop_reason = finished.stop_token
        if branch.detokenizer is not None:
            branch.detokenizer.flush()
            choice.text = branch.detokenizer.text
        request.kv_cache_details = _add(request.kv_cache_details, finished.details)
        if finished.speculation is not None:
            request.speculation = finished.speculation.plus(request.speculation)
        if choice.index == 0:
            request.num_cached_tokens = finished.num_cached_tokens
            branch.metrics.queued_seconds = finished.queued_seconds
        self._close(branch)

    def _close(self, branch: _Branch) -> None:
        """Finish the request if ``branch``, which has ended, was its last one."""
        request = branch.request
        if all(seq_id not in self._branches for seq_id in self._by_request[request.request_id]):
            request.finished = True
            del self._by_request[request.request_id]
            branch.metrics.finished_time = time.time()

    def _sequence(
        self, request_id: str, token_ids: list[int], params: SamplingParams
    ) -> NewSequence:
        """The first branch: the fields of ``params``, some in the form that messages carry."""
        stop_ids = [] if params.ignore_eos else self._eos
        given: dict[str, Any] = {
            **{name: getattr(params, name) for name in _ALIKE},
            "stop_token_ids": [*stop_ids, *(params.stop_token_ids or ())],
            "kv_policy": policy_spec(params.kv_policy),
            "logit_bias": dict(params.logit_bias or {}),
            "allowed_token_ids": list(params.allowed_token_ids or ()),
            "bad_words": self._bad_words(params),
        }
        return NewSequence(self._next_id, request_id, token_ids, **given)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is written at the start of a text and after a space."""
        if not params.bad_words:
            return []
        if self._tokenizer is None:
            raise RequestError("bad_words need a tokenizer", param="bad_words")
        forms = [form for word in params.bad_words for form in (word, " " + word.lstrip())]
        tokens = [self._tokenizer.encode(form, add_special_tokens=False) for form in forms]
        return [list(word) for word in dict.fromkeys(map(tuple, tokens)) if word]

    def _scored_prompt(self) -> ScoredPrompt:
        from kvserve.engine.frontend.scored_prompt import ScoredPrompt

        return ScoredPrompt(self._text)

    def _text(self, token: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.token_text(token)


def _add(total: KVCacheDetails, more: KVCacheDetails) -> KVCacheDetails:
    """Sum over the choices of a request; the policy is the same for all."""
    counts = {
        f.name: getattr(total, f.name) + getattr(more, f.name)
        for f in fields(KVCacheDetails)
        if f.type == "int"
    }
    return replace(more, **counts)
