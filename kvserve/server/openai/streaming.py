"""Writes the outputs of a request as an answer, or as a stream while they grow: chunks, then usage,
then ``[DONE]``.

Every chunk of a stream has the same id and creation time. An error after the first byte becomes an
``error`` event followed by ``[DONE]``, since the status is already sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvserve.outputs import CompletionOutput, RequestOutput
from kvserve.server.openai.chat import ChatPlan
from kvserve.server.openai.logprobs import (
    Echo,
    chat_logprobs,
    completion_logprobs,
    leave_prompt_only,
    prompt_logprobs,
)
from kvserve.server.openai.protocol import CompletionRequest, GenerationRequest
from kvserve.server.openai.responses import usage
from kvserve.server.parsers.message_parser import folded
from kvserve.server.parsers.tool_parsers import Json
from kvserve.server.state.errors import as_api_error
from kvserve.server.state.generation import Generation, unless_disconnected

FIRST_OUTPUT_GRACE = 5.0
"""Seconds to wait for output before the status is sent, so that a refusal gets its own status."""

_DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"


@dataclass
class _Cursor:
    """How much of one choice has been sent."""

    started: bool = False
    text: int = 0
    tokens: int = 0
    traced: int = 0
    finished: bool = False


class AnswerWriter(Protocol):
    """Turns outputs into an answer, or into the bytes of a stream."""

    async def prepare(self, prompt_index: int, output: RequestOutput) -> None:
        """Before an output's chunks: do beside the event loop what takes long."""
        return

    def whole(self, outputs: Sequence[RequestOutput]) -> Json: ...
    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]: ...
    def end(self, outputs: Sequence[RequestOutput]) -> bytes: ...
    def failure(self, exc: Exception) -> bytes: ...


class ChoicesWriter(AnswerWriter):
    """Writes answers of several choices; one subclass for each of OpenAI's two older APIs."""

    object_name: str
    chunk_name: str

    def __init__(
        self,
        request: GenerationRequest,
        fingerprint: str,
        request_id: str,
        model: str,
        num_prompts: int = 1,
    ) -> None:
        self._n = request.n or 1
        self._top = request.num_logprobs() or 0
        self._token_ids = bool(request.return_token_ids)
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._scores_prompt = request.prompt_logprobs is not None
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        self._id = {"id": request_id}
        self._about = {
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._cursors = [_Cursor() for _ in range(self._n * num_prompts)]

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = []
        for prompt_index, output in enumerate(outputs):
            for part, choice in self._choices(prompt_index, output):
                if choice.kv_trace is not None:
                    part["kv_trace"] = choice.kv_trace
                choices.append(part)
        head = {**self._id, **self._about, "object": self.object_name}
        return {**head, "choices": choices, "usage": self._usage(outputs)}

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        """Chunks for everything in ``output`` that the client has not seen."""
        written = []
        for choice in output.outputs:
            index = prompt_index * self._n + choice.index
            cursor = self._cursors[index]
            if cursor.finished:
                continue
            parts = self._parts(index, cursor, choice, output)
            if parts and choice.kv_trace is not None:
                parts[-1]["kv_trace"] = choice.kv_trace[cursor.traced :]
                cursor.traced = len(choice.kv_trace)
            for part in parts:
                counts = self._usage([output]) if self._continuous_usage else None
                if counts is not None and "role" in part.get("delta", ()):  # nothing is said yet
                    counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
                written.append(self._event([part], counts))
        return written

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        return self._event([], self._usage(outputs)) + _DONE if self._include_usage else _DONE

    def failure(self, exc: Exception) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(as_api_error(exc).body()) + _DONE

    def _usage(self, outputs: Sequence[RequestOutput]) -> Json:
        return usage(outputs)

    def _event(self, choices: list[Json], counts: Json | None) -> bytes:
        chunk = {**self._id, "object": self.chunk_name, **self._about, "choices": choices}
        if self._include_usage or counts is not None:
            chunk["usage"] = counts
        return b"data: %b\n\n" % orjson.dumps(chunk)

    def _choices(
        self, prompt_index: int, output: RequestOutput
    ) -> Iterator[tuple[Json, CompletionOutput]]:
        """Each choice of a finished output, as a whole answer has it."""
        raise NotImplementedError

    def _parts(
        self, index: int, cursor: _Cursor, choice: CompletionOutput, output: RequestOutput
    ) -> list[Json]:
        """What is new in a choice, as chunks have it."""
        raise NotImplementedError

    def _advance(self, cursor: _Cursor, choice: CompletionOutput) -> tuple[str, list[int]]:
        """The new text and token ids."""
        text, tokens = choice.text[cursor.text :], choice.token_ids[cursor.tokens :]
        cursor.started = True
        cursor.text, cursor.tokens = len(choice.text), len(choice.token_ids)
        cursor.finished = choice.finished
        return text, tokens


class CompletionWriter(ChoicesWriter):
    """The last text of a choice and its ``finish_reason`` share a chunk."""

    object_name = chunk_name = "text_completion"

    def __init__(
        self, request: CompletionRequest, *args: Any, echoes: Sequence[Echo] | None
    ) -> None:
        super().__init__(request, *args)
        self._echoes = echoes
        self._scores_only = request.scores_only

    async def prepare(self, prompt_index: int, output: RequestOutput) -> None:
        echo = self._echo(prompt_index, output)
        if echo is not None and output.prompt_logprobs is not None and not echo.columns:
            await asyncio.to_thread(echo.encode, output, self._top)

    def _echo(self, prompt_index: int, output: RequestOutput) -> Echo | None:
        """What stands before the choices of an output, which is left as the client wants it."""
        if self._scores_only:
            leave_prompt_only(output)
        return None if self._echoes is None else self._echoes[prompt_index]

    def _choices(
        self, prompt_index: int, output: RequestOutput
    ) -> Iterator[tuple[Json, CompletionOutput]]:
        echo = self._echo(prompt_index, output)
        if echo is not None:
            echo.encode(output, self._top)
        scored = prompt_logprobs(output) if self._scores_prompt else None
        for choice in output.outputs:
            index = prompt_index * self._n + choice.index
            [part] = self._parts(index, self._cursors[index], choice, output)
            if self._scores_prompt:
                part["prompt_logprobs"] = scored
            yield part, choice

    def _parts(
        self, index: int, cursor: _Cursor, choice: CompletionOutput, output: RequestOutput
    ) -> list[Json]:
        if not (choice.token_ids or choice.finished):
            return []  # its prompt, or its blocks, come later than those of other choices
        first, start = not cursor.started, cursor.tokens
        text, tokens = self._advance(cursor, choice)
        echo = None if self._echoes is None else self._echoes[index // self._n]
        if first and echo is not None:
            text = echo.text + text
        logprobs = completion_logprobs(choice, self._top, start, echo, self._as_ids)
        if not (text or choice.finished or (tokens and (self._token_ids or logprobs))):
            return []
        part = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._token_ids:
            part["token_ids"] = tokens
            if first:
                part["prompt_token_ids"] = output.prompt_token_ids
        return [part]


class ChatWriter(ChoicesWriter):
    """In a stream first the role, then content, then an empty delta with ``finish_reason``."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any, plan: ChatPlan) -> None:
        super().__init__(*args)
        self._plan = plan
        self._parsers = [plan.parser() for _ in self._cursors]

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        answer = super().whole(outputs)
        if self._token_ids:
            answer["prompt_token_ids"] = outputs[0].prompt_token_ids
        if self._scores_prompt:
            answer["prompt_logprobs"] = prompt_logprobs(outputs[0])
        return answer

    def _usage(self, outputs: Sequence[RequestOutput]) -> Json:
        return usage(outputs, sum(map(self._plan.reasoning_tokens, outputs)))

    def _choices(
        self, prompt_index: int, output: RequestOutput
    ) -> Iterator[tuple[Json, CompletionOutput]]:
        for choice in output.outputs:
            parser = self._parsers[choice.index]
            part = {
                "index": choice.index,
                "message": folded(parser.push(choice.text, True)),
                "logprobs": self._logprobs(choice),
                "finish_reason": parser.finish_reason(choice.finish_reason),
                "stop_reason": choice.stop_reason,
            }
            if self._token_ids:
                part["token_ids"] = choice.token_ids
            yield part, choice

    def _logprobs(self, choice: CompletionOutput, start: int = 0) -> Json | None:
        return chat_logprobs(choice, self._top, self._plan.token_bytes, start, self._as_ids)

    def _parts(
        self, index: int, cursor: _Cursor, choice: CompletionOutput, output: RequestOutput
    ) -> list[Json]:
        parts = []
        if not cursor.started:
            role = self._part(index, {"role": "assistant", "content": ""})
            if self._token_ids:
                role["prompt_token_ids"] = output.prompt_token_ids
            parts.append(role)
        logprobs = self._logprobs(choice, cursor.tokens)
        text, tokens = self._advance(cursor, choice)
        deltas = self._parsers[index].push(text, choice.finished)
        if not deltas and tokens and (self._token_ids or logprobs):
            deltas = [{"content": ""}]
        parts += [self._part(index, delta) for delta in deltas]
        if deltas:
            parts[-1]["logprobs"] = logprobs
            if self._token_ids:
                parts[-1]["token_ids"] = tokens
        if choice.finished:
            last = self._part(index, {})
            last["finish_reason"] = self._parsers[index].finish_reason(choice.finish_reason)
            last["stop_reason"] = choice.stop_reason
            parts.append(last)
        return parts

    @staticmethod
    def _part(index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class ChoiceWriter(AnswerWriter):
    """Writes answers of one choice that are more than text: items of ``/v1/responses``, blocks of
    ``/v1/messages``. In a stream each change of them is an event."""

    def __init__(self, plan: ChatPlan) -> None:
        self._plan = plan
        self._parser = plan.parser()
        self._seen = 0

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        self.advance(outputs[0])
        return self._finished(outputs[0])

    def advance(self, output: RequestOutput) -> list[Json]:
        """Events for what is new in the only choice."""
        [choice] = output.outputs
        text, self._seen = choice.text[self._seen :], len(choice.text)
        deltas = self._parser.push(text, choice.finished)
        events = [event for delta in deltas for event in self._take(delta)]
        return events + self._close() if choice.finished else events

    def _finished(self, output: RequestOutput) -> Json:
        """The finished answer."""
        raise NotImplementedError

    def _take(self, delta: Json) -> list[Json]:
        """Events for one delta of a chat message."""
        raise NotImplementedError

    def _close(self) -> list[Json]:
        """Events that end what is open, if anything is."""
        raise NotImplementedError


def named_event(event: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), orjson.dumps(event))


async def stream_response(
    generation: Generation, writer: AnswerWriter, receive: Receive, ping_interval: float
) -> EventStream:
    """Answer with a stream. A refusal in the first seconds raises and so gets its own status."""
    first = await generation.first_changes(receive, FIRST_OUTPUT_GRACE)
    return EventStream(_events(generation, writer, first, ping_interval), generation.close)


async def _events(
    generation: Generation,
    writer: AnswerWriter,
    changes: dict[int, RequestOutput] | None,
    ping_interval: float,
) -> AsyncIterator[bytes]:
    try:
        while changes is not None:
            events = []
            for index, output in changes.items():
                await writer.prepare(index, output)
                events += writer.chunks(index, output)
            if events:
                yield b"".join(events)
            elif not changes:
                yield _PING
            changes = await generation.changes(ping_interval)
        yield writer.end(generation.finished_outputs())
    except Exception as exc:
        yield writer.failure(exc)


class EventStream(StreamingResponse):
    """Calls ``close`` however it ends: the last event, a client that hung up, a shutdown.

    The iterator cannot do this: if the client stops reading, it stays suspended at a ``yield``.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await unless_disconnected(receive, self.stream_response(send))
        finally:
            self._close()
