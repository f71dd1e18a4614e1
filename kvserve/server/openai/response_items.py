"""The output of ``/v1/responses``: items that grow, and the events that report them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import orjson

from kvserve.outputs import RequestOutput
from kvserve.server.openai.chat import ChatPlan
from kvserve.server.openai.client_tools import ClientTool, freeform_input
from kvserve.server.openai.responses import usage
from kvserve.server.openai.responses_protocol import ResponsesRequest
from kvserve.server.openai.streaming import ChoiceWriter, named_event
from kvserve.server.parsers.json_text import read_object
from kvserve.server.parsers.tool_parsers import Json
from kvserve.server.state.errors import as_api_error

_ITEM_IDS = {
    **{"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"},
    "tool_search_call": "tsc",
}


class ResponseWriter(ChoiceWriter):
    """Its items are reasoning, message and calls, in the order in which they came."""

    def __init__(
        self, request: ResponsesRequest, response_id: str, model: str, plan: ChatPlan
    ) -> None:
        super().__init__(plan)
        reasoning, text = request.reasoning, request.text
        self._head: Json = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": (request.model_extra or {}).get("metadata") or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": (text and text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [
                tool.model_dump(exclude_none=True)
                for tool in request.tools or ()
                if tool.type == "function"
            ],
            "top_p": request.top_p,
            "truncation": "disabled",
        }
        """What every state of a response has, most of it copied from its request."""
        self._tools = request.client_tools.by_name
        self._output: list[Json] = []
        self._open: str | None = None
        self._sequence = 0

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        events = []
        if not self._sequence:
            for kind in ("response.created", "response.in_progress"):
                events.append(self._event({"type": kind, "response": self._body("in_progress")}))
        return events + [self._event(event) for event in self.advance(output)]

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        body = self._finished(outputs[0])
        return self._event({"type": f"response.{body['status']}", "response": body})

    def failure(self, exc: Exception) -> bytes:
        error = as_api_error(exc)
        failed = {
            **self._body("failed"),
            "error": {"code": "server_error", "message": error.message},
        }
        return self._event({"type": "response.failed", "response": failed})

    def _finished(self, output: RequestOutput) -> Json:
        cut = output.outputs[0].finish_reason == "length"
        body = self._body("incomplete" if cut else "completed")
        if cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        counts = usage([output], self._plan.reasoning_tokens(output))
        body["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
            "kv_cache_details": counts["kv_cache_details"],
        }
        if "speculation" in counts:
            body["usage"]["speculation"] = counts["speculation"]
        return body

    def _body(self, status: str) -> Json:
        return {**self._head, "status": status, "output": list(self._output), "usage": None}

    def _event(self, event: Json) -> bytes:
        event["sequence_number"] = self._sequence
        self._sequence += 1
        return named_event(event)

    # ---- items ----------------------------------------------------------------------------------

    def _take(self, delta: Json) -> list[Json]:
        """Events for one delta of a chat message."""
        if "reasoning" in delta:
            return self._text("reasoning", delta["reasoning"])
        if "content" in delta:
            return self._text("message", delta["content"])
        return [event for call in delta["tool_calls"] for event in self._call(call)]

    def _close(self) -> list[Json]:
        """Events that end the open item, if there is one."""
        if self._open is None:
            return []
        item, kind = self._output[-1], self._open
        self._open = None
        item["status"] = "completed"
        where = self._where()
        if kind == "function_call":
            arguments = item["arguments"]
            done = {"type": "response.function_call_arguments.done", "arguments": arguments}
            return [{**done, **where}, self._item_event("done")]
        if kind == "custom_tool_call":
            return self._end_freeform()
        if kind == "tool_search_call":
            item["arguments"] = read_object(item["arguments"])
            return [self._item_event("done")]
        part = item["content"][0]
        where["content_index"] = 0
        name = "output_text" if kind == "message" else "reasoning_text"
        text = {"type": f"response.{name}.done", "text": part["text"], **where}
        if kind == "reasoning":
            return [text, self._item_event("done")]
        ended = {"type": "response.content_part.done", "part": dict(part), **where}
        return [{**text, "logprobs": []}, ended, self._item_event("done")]

    def _text(self, kind: str, text: str) -> list[Json]:
        events = []
        if self._open != kind:
            part: Json = {"type": "reasoning_text", "text": ""}
            item: Json = {"type": kind, "summary": [], "content": [part]}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": []}
                item = {"type": kind, "role": "assistant", "content": [part]}
            events = self._start(kind, item)
            if kind == "message":
                where = {**self._where(), "content_index": 0}
                events.append({"type": "response.content_part.added", "part": dict(part), **where})
        self._output[-1]["content"][0]["text"] += text
        name = "output_text" if kind == "message" else "reasoning_text"
        delta: Json = {"type": f"response.{name}.delta", "delta": text, **self._where()}
        delta["content_index"] = 0
        return [*events, {**delta, "logprobs": []} if kind == "message" else delta]

    def _call(self, call: Json) -> list[Json]:
        events, function = [], call["function"]
        if "id" in call:
            own = self._tools.get(function["name"]) or ClientTool(function["name"])
            item = {**own.item(), "call_id": call["id"]}
            events = self._start(item["type"], {**item, "arguments": ""})
        self._output[-1]["arguments"] += function["arguments"]
        if not function["arguments"] or self._open != "function_call":
            return events
        kind = "response.function_call_arguments.delta"
        return [*events, {"type": kind, "delta": function["arguments"], **self._where()}]

    def _end_freeform(self) -> list[Json]:
        """Its text is within JSON until then."""
        item = self._output[-1]
        item["input"] = freeform_input(item.pop("arguments"))
        kind, where = "response.custom_tool_call_input", self._where()
        return [
            {"type": f"{kind}.delta", "delta": item["input"], **where},
            {"type": f"{kind}.done", "input": item["input"], **where},
            self._item_event("done"),
        ]

    def _start(self, kind: str, item: Json) -> list[Json]:
        events = self._close()
        item = {"id": f"{_ITEM_IDS[kind]}_{secrets.token_hex(12)}", **item, "status": "in_progress"}
        self._output.append(item)
        self._open = kind
        return [*events, self._item_event("added")]

    def _item_event(self, what: str) -> Json:
        item = orjson.loads(orjson.dumps(self._output[-1]))  # a copy: the item goes on growing
        if what == "added" and "content" in item:
            item["content"] = []
        if what == "added" and item["type"] == "custom_tool_call":
            item["input"] = item.pop("arguments")
        if what == "added" and item["type"] == "tool_search_call":
            item["arguments"] = {}
        where = {"output_index": len(self._output) - 1}
        return {"type": f"response.output_item.{what}", "item": item, **where}

    def _where(self) -> Json:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
