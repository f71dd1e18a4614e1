"""Brings conversations into the form that a chat template wants.

Templates do not say what they want of an assistant's call: no content or an empty one, arguments as
an object or as a text, one call in a message or several. Some raise an error where they get
something else, some leave the call out without a word. So small conversations are rendered, and the
first form in which everything shows is the template's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvserve.engine.frontend.content import read_content, unread
from kvserve.engine.frontend.efforts import Reasons
from kvserve.engine.frontend.system_turns import Message, SystemTurns, joined
from kvserve.log import RequestError

_NOT_FOR_TEMPLATES = frozenset(
    (
        *("messages", "conversation", "tokenize", "tokenizer_kwargs", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    )
)
"""Arguments of transformers' ``apply_chat_template`` that do not go to the template."""
ABSENT = "absent"
_NO_OBJECT = "arguments"
_OF_CALLS = ("tool_calls", "tool_call_id", "name")
_WHOLE: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


@dataclass(frozen=True)
class Forms:
    """What a template wants."""

    empty: str | None = ""
    """The content beside calls where there is none: ``""``, ``None``, or no such key."""
    text_arguments: bool = False
    """Arguments are JSON text."""
    text_values: bool = False
    """Each argument is a text."""
    short_ids: bool = False
    """Ids of calls have nine letters and digits."""
    named_ids: bool = False
    """An id is the call's name and number, as Kimi has them."""
    split: bool = False
    """Content and calls are two messages."""
    one_call: bool = False
    """A message has one call, and its result follows."""
    merge: bool = False
    """Neighbours of one role are one message."""
    no_empty: bool = False
    """No turn of the assistant is empty."""
    user_first: bool = False
    """The first turn that is not the system's is a user's."""
    after_results: bool = True
    """A user's turn may come behind the results of calls."""
    parts: bool = False
    """Content is a list of parts."""
    shows_calls: bool = True
    shows_tools: bool = True
    bare_tools: bool = False
    """Tools are functions without what says that they are."""
    whole_tools: bool = False
    """Each has a description and parameters."""
    empty_tools: bool = False
    """No tools are an empty list."""
    system: SystemTurns = field(default_factory=SystemTurns)
    reasons: Reasons = field(default_factory=Reasons)

    def apply(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """The conversation in this form."""
        out = [_one_form(message) for message in messages]
        if not self.shows_calls:
            out = _calls_as_text(out)
        out = _without_calls(self.system.place(out))
        if self.no_empty:
            out = [m for m in out if m["role"] != "assistant" or m["content"] or "tool_calls" in m]
        if self.user_first:
            at = next((i for i, each in enumerate(out) if each["role"] != "system"), len(out))
            if at < len(out) and out[at]["role"] == "assistant":
                out.insert(at, {"role": "user", "content": ""})
        _join_results(out)
        if self.named_ids:
            _name_ids(out)
        if not self.after_results:
            out = _behind_results(out)
        if self.merge:
            out = _merged(out)
        if self.one_call:
            out = _one_by_one(out)
        if self.split:
            out = [part for message in out for part in _split(message)]
        for message in out:
            self._finish(message)
        return out

    def tools(self, tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
        """The tools in this form; none where the template does not show them: some refuse them."""
        if not tools or not self.shows_tools:
            return [] if self.empty_tools else None
        tools = [t if "function" in t else {"type": "function", "function": t} for t in tools]
        functions = [{k: v for k, v in tool["function"].items() if v is not None} for tool in tools]
        if self.whole_tools:
            functions = [{**_WHOLE, **each} for each in functions]
            for each in functions:
                each["parameters"] = {**_WHOLE["parameters"], **each["parameters"]}
        if self.bare_tools:
            return functions
        return [{**t, "function": each} for t, each in zip(tools, functions, strict=True)]

    def _finish(self, message: Message) -> None:
        if message.get("tool_calls"):
            message["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            if not message["content"]:
                message["content"] = self.empty
                if self.empty == ABSENT:
                    del message["content"]
        if self.short_ids and message.get("tool_call_id"):
            message["tool_call_id"] = _short(message["tool_call_id"])
        if self.parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]

    def _call(self, call: Mapping[str, Any]) -> Message:
        function = dict(call["function"])
        given = _arguments(function.get("arguments"), self.text_arguments)
        if self.text_values and isinstance(given, Mapping):
            given = {k: v if isinstance(v, str) else json.dumps(v) for k, v in given.items()}
        function["arguments"] = given
        made = {"type": "function", **call, "function": function}
        if self.short_ids and made.get("id"):
            made["id"] = _short(made["id"])
        return made


# ---- one form for what clients send -----------------------------------------------------------


def _one_form(message: Mapping[str, Any]) -> Message:
    """A message without what is empty in it, under today's names."""
    made = {name: value for name, value in message.items() if value is not None}
    role = made.get("role")
    reading = read_content(made.get("content"), str(role), "messages")
    if reading.unseen:  # a server has read them before
        raise unread(reading.unseen[0], "messages")
    made["content"] = "\n".join(reading.texts)
    made["role"] = {"developer": "system", "function": "tool"}.get(str(role), role)
    if not made.get("tool_calls"):
        made.pop("tool_calls", None)
        call = made.pop("function_call", None)
        if isinstance(call, Mapping) and call.get("name"):
            made["tool_calls"] = [{"type": "function", "function": dict(call)}]
    thought = made.get("reasoning_content") or made.get("reasoning") or reading.thought
    for name in ("reasoning", "reasoning_content", "thinking"):
        if isinstance(thought, str) and thought:
            made[name] = thought
        elif name != "thinking":
            made.pop(name, None)
    return made


def template_arguments(
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Arguments of ``Tokenizer.render_chat`` from the fields of a chat request."""
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    own = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": bool(continue_final_message),
        "chat_template": chat_template,
        **more,
    }
    kwargs = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(kwargs, Mapping):
        raise RequestError("chat_template_kwargs must be a mapping", param="chat_template_kwargs")
    if clash := sorted((own.keys() | _NOT_FOR_TEMPLATES) & kwargs.keys()):
        raise RequestError(
            f"chat_template_kwargs must not hold {', '.join(clash)}", param="chat_template_kwargs"
        )
    return {**own, **kwargs}


def _arguments(arguments: Any, as_text: bool) -> Any:
    """Arguments as an object or as its text; what is no object, as a call that was cut, is one
    argument."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return arguments if as_text else {_NO_OBJECT: arguments}
        if as_text and value is not None:
            return arguments.strip() or "{}"
    value = {} if value is None else value
    if as_text:
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, Mapping) else {_NO_OBJECT: value}


def _calls_as_text(messages: Iterable[Message]) -> list[Message]:
    """Calls within what the assistant says, as Hermes' models write them, and results as what the
    user says."""
    out: list[Message] = []
    for message in messages:
        made = _as_users(message) if message["role"] == "tool" else dict(message)
        made.pop("tool_calls", None)
        texts = [made["content"]] if made["content"] else []
        for call in message.get("tool_calls", ()):
            name, given = call["function"]["name"], call["function"].get("arguments")
            called = {"name": name, "arguments": _arguments(given, as_text=False)}
            texts.append(f"<tool_call>\n{json.dumps(called, ensure_ascii=False)}\n</tool_call>")
        made["content"] = "\n".join(texts)
        results = message["role"] == "tool" and out and out[-1]["role"] == "user"
        out[-1:] = joined([out[-1], made]) if results else [*out[-1:], made]
    return out


def _without_calls(messages: Iterable[Message]) -> list[Message]:
    """Results behind no call, as of a history that was cut, are what the user says."""
    out: list[Message] = []
    called = False
    for message in messages:
        if message["role"] == "tool" and not called:
            message = _as_users(message)
        elif message["role"] not in ("tool", "system"):
            called = bool(message.get("tool_calls"))
        out.append(message)
    return out


def _as_users(result: Message) -> Message:
    text = f"<tool_response>\n{result['content']}\n</tool_response>"
    kept = {key: value for key, value in result.items() if key not in _OF_CALLS}
    return {**kept, "role": "user", "content": text}


def _name_ids(messages: Iterable[Message]) -> None:
    """Give calls and their results ids that name the call."""
    named: dict[str, str] = {}
    number = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            named[call["id"]] = f"functions.{call['function']['name']}:{number}"
            calls.append({**call, "id": named[call["id"]]})
            number += 1
        if calls:
            message["tool_calls"] = calls
        if message.get("tool_call_id") in named:
            message["tool_call_id"] = named[message["tool_call_id"]]


def _join_results(messages: Iterable[Message]) -> None:
    """Give calls and their results what some templates write: ids, and the results the tools'
    names."""
    open_calls: dict[str, str] = {}
    for message in messages:
        calls = message.get("tool_calls", ())
        if calls:
            calls = [{**call, "id": call.get("id") or f"call_{i}"} for i, call in enumerate(calls)]
            message["tool_calls"] = calls
            open_calls = {call["id"]: call["function"]["name"] for call in calls}
        if message["role"] == "tool" and open_calls:
            call_id = message.setdefault("tool_call_id", next(iter(open_calls)))
            if call_id in open_calls:
                message.setdefault("name", open_calls.pop(call_id))


def _one_by_one(messages: list[Message]) -> list[Message]:
    """Each call in a message of its own, with its result behind it."""
    out: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            out.append(message)
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        ids = [call.get("id") for call in calls]
        for place, call in enumerate(calls):
            own = message if not place else {"role": message["role"], "content": ""}
            out.append({**own, "tool_calls": [call]})
            own_results = [r for r in results if r.get("tool_call_id") == call.get("id")]
            strays = [r for r in results if r.get("tool_call_id") not in ids]
            for result in own_results[:1] or strays[:1]:
                results.remove(result)
                out.append(result)
        out += results
    return out


def _split(message: Message) -> list[Message]:
    """Content, and the calls behind it, if a message has both."""
    if not (message.get("tool_calls") and message["content"]):
        return [message]
    return [{"role": message["role"], "content": message["content"]}, {**message, "content": ""}]


def _merged(messages: Iterable[Message]) -> list[Message]:
    out: list[Message] = []
    for message in messages:
        both = message["role"] != "tool" and out and out[-1]["role"] == message["role"]
        if both and not out[-1].get("tool_calls"):
            out[-1:] = joined([out[-1], message])
        else:
            out.append(message)
    return out


def _behind_results(messages: Iterable[Message]) -> list[Message]:
    """What a user says behind results of calls is in the last one's text, or is that."""
    out: list[Message] = []
    for message in messages:
        calls = out[-1].get("tool_calls") if out else None
        if message["role"] == "user" and calls:
            [*_, last] = calls
            name, call_id = last["function"]["name"], last["id"]
            out.append({**message, "role": "tool", "tool_call_id": call_id, "name": name})
        elif message["role"] == "user" and out and out[-1]["role"] == "tool":
            out[-1:] = joined([out[-1], {"content": message["content"]}])
        else:
            out.append(message)
    return out


def _short(call_id: str) -> str:
    """An id of nine letters and digits, the same for the same id."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode()).hexdigest()[:9]
