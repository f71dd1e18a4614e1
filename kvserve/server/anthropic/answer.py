"""Answers of ``/v1/messages``: blocks that grow, the events that report them, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from kvserve.outputs import CompletionOutput, RequestOutput
from kvserve.server.openai.chat import ChatPlan
from kvserve.server.openai.streaming import ChoiceWriter, named_event
from kvserve.server.parsers.json_text import read_object, write_json
from kvserve.server.parsers.tool_parsers import Json
from kvserve.server.state.errors import as_api_error


class MessageWriter(ChoiceWriter):
    """Turns one request's outputs into events, and into the finished message.

    ``most``: the tokens that the client allows; fewer may fit the context.
    """

    def __init__(self, message_id: str, model: str, plan: ChatPlan, most: int | None) -> None:
        super().__init__(plan)
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._most = most
        self._blocks: list[Json] = []
        self._open = self._begun = False

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        events = []
        if not self._begun:
            self._begun = True
            begun = self._message([], None, None, _usage(output, 0))
            events = [{"type": "message_start", "message": begun}]
        return [named_event(event) for event in (*events, *self.advance(output))]

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        [choice] = outputs[0].outputs
        reason, sequence = self._stop(choice)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        counts = _usage(outputs[0], len(choice.token_ids))
        ended = {"type": "message_delta", "delta": delta, "usage": counts}
        return named_event(ended) + named_event({"type": "message_stop"})

    def failure(self, exc: Exception) -> bytes:
        return named_event(as_api_error(exc).body(messages=True))

    def _finished(self, output: RequestOutput) -> Json:
        [choice] = output.outputs
        blocks = [
            {**block, "input": _arguments(block["input"])} if block["type"] == "tool_use" else block
            for block in self._blocks
        ]
        counts = _usage(output, len(choice.token_ids))
        return self._message(blocks, *self._stop(choice), counts)

    def _message(
        self, blocks: list[Json], reason: str | None, sequence: str | None, counts: Json
    ) -> Json:
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        return {**self._head, "content": blocks, **ended, "usage": counts}

    def _stop(self, choice: CompletionOutput) -> tuple[str, str | None]:
        if choice.finish_reason == "length":
            cut = self._most is not None and len(choice.token_ids) >= self._most
            return "max_tokens" if cut else "model_context_window_exceeded", None
        if any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use", None
        if isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        return "end_turn", None

    # ---- blocks ---------------------------------------------------------------------------------

    def _take(self, delta: Json) -> list[Json]:
        if "reasoning" in delta:
            start = {"type": "thinking", "thinking": "", "signature": ""}
            return self._grow(start, "thinking", "thinking_delta", delta["reasoning"])
        if "content" in delta:
            return self._grow({"type": "text", "text": ""}, "text", "text_delta", delta["content"])
        events: list[Json] = []
        for call in delta["tool_calls"]:
            function = call["function"]
            if "id" in call:
                block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
                events += self._start({**block, "input": ""})
            if function["arguments"]:
                events += self._grow(None, "input", "input_json_delta", function["arguments"])
        return events

    def _grow(self, start: Json | None, field: str, kind: str, text: str) -> list[Json]:
        """Add text to the open block, or to a new one if that is of another type."""
        events = []
        if start is not None and not (self._open and self._blocks[-1]["type"] == start["type"]):
            events = self._start(start)
        self._blocks[-1][field] += text
        name = "partial_json" if field == "input" else field
        where = {"type": "content_block_delta", "index": len(self._blocks) - 1}
        return [*events, {**where, "delta": {"type": kind, name: text}}]

    def _start(self, block: Json) -> list[Json]:
        events = self._close()
        self._blocks.append(block)
        self._open = True
        shown = {**block, "input": {}} if "input" in block else dict(block)
        index = len(self._blocks) - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": shown}]

    def _close(self) -> list[Json]:
        closed, self._open = self._open, False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}] if closed else []


def _arguments(text: str) -> Any:
    """A call's arguments; what there is of them if the answer was cut."""
    value = read_object(text)
    try:
        orjson.dumps(value)
    except TypeError:  # a lone surrogate, an integer of more than 64 bits, or too many levels
        with suppress(ValueError, RecursionError):
            return orjson.Fragment(write_json(value))
        return {}
    return value


def _usage(output: RequestOutput, generated: int) -> Json:
    """``input_tokens`` are those that were not found in the cache."""
    cached = output.num_cached_tokens
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }
