"""The prompts of one HTTP request while the engine works on them.

One task per prompt reads the engine's outputs, and the answer is made from the newest ones. So a
slow client gets several tokens at once, and no queue grows.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from kvserve.log import RequestError, logger, shown
from kvserve.outputs import RequestOutput
from kvserve.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutput
from kvserve.server.state.engine_protocol import OpenRequest
from kvserve.server.state.errors import too_many
from kvserve.server.state.metrics import Metrics
from kvserve.server.state.server_state import ServerState

_T = TypeVar("_T")


class Generation:
    """Starts when created. ``close`` may be called from anywhere; it aborts unfinished prompts.

    Errors name the fields ``max_tokens`` and ``prompt`` by their ``own_names``.
    """

    def __init__(
        self,
        state: ServerState,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        request_id: str,
        headers: Mapping[str, str] | None = None,
        own_names: Mapping[Any, str] | None = None,
    ) -> None:
        self.request_id = request_id
        self.num_sequences = len(prompts) * params.n
        self.client = params.client
        state.check_queue(len(prompts), params.n, self.client)
        context = state.engine.info.max_model_len
        self._prompt_numbers = check_logprobs(params, prompts, context, state.generations)
        self.outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._state = state
        self._params = params
        self._changed: dict[int, RequestOutput] = {}
        self._wake = asyncio.Event()
        self._failure: Exception | None = None
        self._unfinished = len(prompts)
        self._headers = headers or {}
        self._own_names = own_names or {}
        state.generations.add(self)
        if state.settings.enable_log_requests:
            lengths = [len(prompt) for prompt in prompts]
            logger.info("%s: prompts of %s tokens, %s", request_id, lengths, _sizes(params))
        self._tasks = [
            asyncio.create_task(self._follow(index, prompt, f"{request_id}-{index}"))
            for index, prompt in enumerate(prompts)
        ]

    async def changes(self, timeout: float) -> dict[int, RequestOutput] | None:
        """Outputs that grew since the last call, by the prompt's index.

        ``{}`` after ``timeout`` seconds without any, ``None`` at the end. Raises the engine's error
        at once, even if outputs from before it were not returned yet.
        """
        if not self._changed and self._failure is None and self._unfinished:
            self._wake.clear()
            # A timer rather than wait_for, which costs a task per token on Python 3.11.
            timer = asyncio.get_running_loop().call_later(timeout, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
        if self._failure is not None:
            raise self._failure
        if not self._changed and not self._unfinished:
            return None
        changed, self._changed = self._changed, {}
        return changed

    async def first_changes(
        self, receive: Receive, timeout: float
    ) -> dict[int, RequestOutput] | None:
        """``changes`` before the answer has begun. If the client disconnects, the request ends."""
        try:
            return await unless_disconnected(receive, self.changes(timeout))
        except BaseException:
            self.close()
            raise

    async def finish(self, receive: Receive, answer: Callable[[list[RequestOutput]], _T]) -> _T:
        """What ``answer`` makes of all outputs. If the client disconnects, the request ends.

        Log-probabilities are many: their answer is made in a thread.
        """
        try:
            await unless_disconnected(receive, self._settled())
            if self._params.logprobs is None and self._params.prompt_logprobs is None:
                return answer(self.finished_outputs())
            return await asyncio.to_thread(answer, self.finished_outputs())
        finally:
            self.close()

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities that it holds or will hold of its prompts, and has of its answers."""
        each = 0 if self._params.logprobs is None else self._params.logprobs + 1
        tokens = sum(
            len(choice.token_ids) for output in self.finished_outputs() for choice in output.outputs
        )
        return self._prompt_numbers + tokens * each

    async def _settled(self) -> None:
        await asyncio.wait(self._tasks)
        if self._failure is not None:
            raise self._failure

    def finished_outputs(self) -> list[RequestOutput]:
        return [output for output in self.outputs if output is not None]

    def fail(self, exc: Exception) -> None:
        """End the request with an error that the client gets."""
        self._failure = self._failure or exc
        self._wake.set()
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        self._state.generations.discard(self)
        for task in self._tasks:
            task.cancel()
        # A cancelled task holds its frame, and that holds this object: all outputs would stay until
        # the next collection of cycles.
        self._tasks.clear()

    async def _follow(self, index: int, prompt: Sequence[int], request_id: str) -> None:
        # Make the engine's id unique: two clients may send the same X-Request-Id.
        unique_id = f"{request_id}-{secrets.token_hex(4)}"
        watch = RequestWatch(self._state.metrics, self._params)
        tracer = self._state.tracer
        span = tracer and tracer.start(self._headers, request_id, self._params)
        outputs = cast(
            AsyncGenerator[RequestOutput, None],
            self._state.engine.generate(prompt, self._params, unique_id),
        )
        try:
            async for output in outputs:
                watch.progress(output)
                self.outputs[index] = self._changed[index] = output
                self._wake.set()
        except RequestError as exc:
            self.fail(exc.renamed(self._own_names))
        except Exception as exc:
            watch.count_unfinished("error")
            self.fail(exc)
        except asyncio.CancelledError:
            watch.count_unfinished("abort")
            raise
        finally:
            if tracer is not None:
                tracer.end(span, self.outputs[index])
            self._unfinished -= 1
            self._wake.set()
            await outputs.aclose()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, or ``ClientDisconnect`` as soon as the client has gone.

    A task group, as Starlette's streams have it, would refer to itself through its tasks' errors,
    and keep what they hold until the next collection of cycles.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has gone; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- log-probabilities -------------------------------------------------------------------------

_LEAST = 2**19
"""So many log-probabilities an answer may have, however short the model's context is."""
_AT_ONCE = 2
"""How many of the largest answers may be made at once. A number takes some 300 bytes."""


def check_logprobs(
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    context: int,
    others: Iterable[OpenRequest],
) -> int:
    """How many log-probabilities of the prompts' tokens an answer has.

    400 for an answer with too many in all, 429 while ``others`` have too many. One choice with a
    full context of tokens is never too much.
    """
    if params.logprobs is None and params.prompt_logprobs is None:
        return 0
    most = max(_LEAST, context * (MAX_LOGPROBS + 1))
    each = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
    prompt = sum(map(len, prompts)) * each * params.n  # each choice repeats its prompt's
    longest = max(context - min(map(len, prompts), default=0), 0)
    tokens = longest if params.max_tokens is None else min(params.max_tokens, longest)
    each = 0 if params.logprobs is None else params.logprobs + 1
    wanted = prompt + len(prompts) * params.n * tokens * each
    if wanted > most:
        field = "prompt_logprobs" if params.logprobs is None else "logprobs"
        raise RequestError(
            f"{field}: this asks for up to {wanted} log-probabilities, and an answer has at most "
            f"{most}; send fewer prompts at once, or lower {field}, max_tokens or n",
            param=field,
        )
    if prompt and prompt + sum(other.num_logprobs for other in others) > _AT_ONCE * most:
        raise too_many("too many log-probabilities are being computed for others; try again")
    return prompt


class RequestWatch:
    """Feeds the histograms and counters of ``/metrics`` from the growing output of one prompt."""

    def __init__(self, metrics: Metrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._started = self._previous = time.monotonic()
        self._first: float | None = None
        self._tokens = 0
        self._engine = "0"

    def progress(self, output: RequestOutput) -> None:
        now, self._engine = time.monotonic(), output.engine
        tokens = sum(len(choice.token_ids) for choice in output.outputs)
        if tokens > self._tokens:
            if self._first is None:
                self._first = now
                self._observe("time_to_first_token_seconds", now - self._started)
            else:
                self._observe("inter_token_latency_seconds", now - self._previous)
            self._previous, self._tokens = now, tokens
        if output.finished:
            self._finish(output, now)

    def count_unfinished(self, reason: str) -> None:
        """Count a prompt that ended unfinished: the client left, or the engine failed."""
        self._metrics.count_finished(reason, self._engine)

    def _finish(self, output: RequestOutput, now: float) -> None:
        metrics = self._metrics
        total, first = now - self._started, self._first or now
        queued = output.metrics.queued_seconds if output.metrics is not None else 0.0
        self._observe("e2e_request_latency_seconds", total)
        self._observe("request_queue_time_seconds", queued)
        self._observe("request_prefill_time_seconds", max(first - self._started - queued, 0.0))
        self._observe("request_decode_time_seconds", now - first)
        self._observe("request_inference_time_seconds", max(total - queued, 0.0))
        if self._tokens > len(output.outputs):
            mean = (now - first) / (self._tokens / len(output.outputs) - 1)
            self._observe("request_time_per_output_token_seconds", mean)
        self._observe("request_prompt_tokens", len(output.prompt_token_ids))
        self._observe("request_generation_tokens", self._tokens)
        self._observe("request_params_n", self._params.n)
        if self._params.max_tokens is not None:
            self._observe("request_params_max_tokens", self._params.max_tokens)
        cached = output.num_cached_tokens
        if output.kv_cache_details.resumed_tokens:
            cached = 0  # they came from a continuation, not the prefix cache
        metrics.count_prompt(len(output.prompt_token_ids), cached, self._engine)
        for choice in output.outputs:
            metrics.count_finished(choice.finish_reason or "abort", self._engine)

    def _observe(self, name: str, value: float) -> None:
        self._metrics.observe(name, value, self._engine)


def _sizes(params: SamplingParams) -> str:
    """The settings that are not the defaults, for the log: numbers, and the sizes of what else was
    sent. Salts, stop strings and grammars are the client's."""
    said = []
    for item in fields(params):
        value = getattr(params, item.name)
        if value == item.default or value is None:
            continue
        if item.name == "kv_policy":
            value = shown(value if isinstance(value, str) else value.get("name"))
        elif isinstance(value, StructuredOutput):
            value = f"{value.kind} of {len(value.value)}"
        elif not isinstance(value, int | float) and item.name != "client":
            value = f"({len(value)})"
        said.append(f"{item.name}={value}")
    return " ".join(said)
