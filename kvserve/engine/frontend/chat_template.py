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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from kvserve.log import RequestError

Message = dict[str, Any]
Render = Callable[..., str]
"""Messages, and arguments of the template -> text."""

_NOT_FOR_TEMPLATES = frozenset(
    (
        *("messages", "conversation", "tokenize", "tokenizer_kwargs", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    )
)
"""Arguments of transformers' ``apply_chat_template`` that do not go to the template."""
_ABSENT = "absent"
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
TOOL, KEY, VALUE = "kvserve_tool", "kvserve_key", "kvserve value"
_TEXT, _RESULT, _THOUGHT = "kvserve text", "kvserve result", "kvserve thought"
PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "d",
            "parameters": {"type": "object", "properties": {"kvserve_p": {"type": "string"}}},
        },
    }
]


@dataclass(frozen=True)
class Forms:
    """What a template wants."""

    empty: str | None = ""
    """The content beside calls where there is none: ``""``, ``None``, or no such key."""
    text_arguments: bool = False
    """Arguments are JSON text."""
    short_ids: bool = False
    """Ids of calls have nine letters and digits."""
    split: bool = False
    """Content and calls are two messages."""
    one_call: bool = False
    """A message has one call, and its result follows."""
    merge: bool = False
    """Neighbours that are both the system's or the user's are one message."""
    parts: bool = False
    """Content is a list of parts."""
    shows_calls: bool = True
    shows_tools: bool = True

    def apply(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """The conversation in this form; ``RequestError`` if its calls would not show."""
        out = [_one_form(message) for message in messages]
        if not self.shows_calls and any(message.get("tool_calls") for message in out):
            raise RequestError(
                "messages: this model's chat template does not write tool calls; leave them out",
                param="messages",
            )
        _join_results(out)
        if self.one_call:
            out = _one_by_one(out)
        if self.split:
            out = [part for message in out for part in _split(message)]
        if self.merge:
            out = _merged(out)
        for message in out:
            self._finish(message)
        return out

    def _finish(self, message: Message) -> None:
        if message.get("tool_calls"):
            message["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            if not message["content"]:
                message["content"] = self.empty
                if self.empty == _ABSENT:
                    del message["content"]
        if self.short_ids and message.get("tool_call_id"):
            message["tool_call_id"] = _short(message["tool_call_id"])
        if self.parts and message.get("content"):
            message["content"] = [{"type": "text", "text": message["content"]}]

    def _call(self, call: Mapping[str, Any]) -> Message:
        function = dict(call["function"])
        function["arguments"] = _arguments(function.get("arguments"), self.text_arguments)
        made = {"type": "function", **call, "function": function}
        if self.short_ids and made.get("id"):
            made["id"] = _short(made["id"])
        return made


# ---- one form for what clients send -----------------------------------------------------------


def _one_form(message: Mapping[str, Any]) -> Message:
    """A message without what is empty in it, under today's names."""
    made = {name: value for name, value in message.items() if value is not None}
    made["content"] = join_text(made.get("content"), "messages")
    role = made.get("role")
    made["role"] = {"developer": "system", "function": "tool"}.get(str(role), role)
    if not made.get("tool_calls"):
        made.pop("tool_calls", None)
        call = made.pop("function_call", None)
        if isinstance(call, Mapping) and call.get("name"):
            made["tool_calls"] = [{"type": "function", "function": dict(call)}]
    thought = made.get("reasoning_content") or made.get("reasoning")
    for name in ("reasoning", "reasoning_content", "thinking"):
        if isinstance(thought, str) and thought:
            made[name] = thought
        elif name != "thinking":
            made.pop(name, None)
    return made


def join_text(content: Any, param: str | None = None) -> str:
    """A message's text: parts joined by newlines. ``RequestError`` for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError("content must be a string or a list of content parts", param=param)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise RequestError(
                f"content parts of type {kind!r} are not supported; only text is", param=param
            )
        texts.append(text)
    return "\n".join(texts)


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
    """Arguments as an object or as its text; a text that is no object stays as it is."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return arguments
        if as_text and value is not None:
            return arguments.strip() or "{}"
        arguments = value
    value = {} if arguments is None else arguments
    return json.dumps(value, ensure_ascii=False) if as_text else value


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
        both = message["role"] in ("system", "user") and out and out[-1]["role"] == message["role"]
        if both and isinstance(message["content"], str) and isinstance(out[-1]["content"], str):
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{message['content']}"}
        else:
            out.append(message)
    return out


def _short(call_id: str) -> str:
    """An id of nine letters and digits, the same for the same id."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode()).hexdigest()[:9]


# ---- what a template wants ----------------------------------------------------------------------


def find_forms(render: Render) -> Forms:
    """Try a template; ``render`` may raise anything."""

    def rendered(forms: Forms, messages: Sequence[Message]) -> str:
        try:
            return render(forms.apply(messages), tools=PROBE_TOOLS)
        except Exception:  # what the template's author chose
            return ""

    forms = Forms()
    user, call = conversation(), conversation(called_conversation())
    nones = rendered(forms, user).count("None")

    def shows(forms: Forms, messages: Sequence[Message], *words: str) -> bool:
        text = rendered(forms, messages)
        # Not an object or None as Python prints them, nor JSON text within JSON.
        wrong = f"'{KEY}'" in text or f'\\"{KEY}' in text or text.count("None") > nones
        return all(word in text for word in words) and not wrong

    if not shows(forms, user, _TEXT) and shows(replace(forms, parts=True), user, _TEXT):
        forms = replace(forms, parts=True)
    shown = (TOOL, KEY, VALUE, _RESULT)
    for short, text, empty in product((False, True), (False, True), ("", None, _ABSENT)):
        tried = replace(forms, short_ids=short, text_arguments=text, empty=empty)
        if shows(tried, call, *shown):
            forms = tried
            break
    else:
        forms = replace(forms, shows_calls=False)
    forms = replace(forms, shows_tools=TOOL in rendered(forms, user))
    both = conversation(called_conversation(content=_TEXT + "2", reasoning=_THOUGHT))
    two = conversation(called_conversation(2))
    system = {"role": "system", "content": _TEXT + "1"}
    many = [system, {**system, "content": _TEXT + "2"}, *user, *user]
    for change, messages, words in (
        ("split", both, (*shown, _TEXT + "2")),
        ("one_call", two, (*shown, VALUE + "1", _RESULT + "1")),
        ("merge", many, (_TEXT + "1", _TEXT + "2")),
        ("merge", [*user, *user], (_TEXT,)),
    ):
        changed = replace(forms, **{change: True})  # type: ignore[arg-type]
        if not shows(forms, messages, *words) and shows(changed, messages, *words):
            forms = changed
    return forms


def called_conversation(count: int = 1, **more: str) -> list[Message]:
    """An assistant's message with calls, and their results."""
    calls, results = [], []
    for at in range(count):
        call_id, number = f"call_{at:024x}", str(at or "")
        function = {"name": TOOL, "arguments": json.dumps({KEY: VALUE + number})}
        calls.append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": call_id, "content": _RESULT + number})
    return [{"role": "assistant", "content": "", **more, "tool_calls": calls}, *results]


def conversation(more: Sequence[Message] = ()) -> list[Message]:
    return [{"role": "user", "content": _TEXT}, *more]


def written_calls(render: Render, count: int = 1) -> str:
    """How a template writes an assistant's message with calls; ``""`` if it does not.

    ``render`` brings messages into the template's form.
    """
    start, turn = conversation(), called_conversation(count)[:1]
    try:
        before = render(start, tools=PROBE_TOOLS, add_generation_prompt=True)
        after = render(start + turn, tools=PROBE_TOOLS, add_generation_prompt=False)
    except Exception:
        return ""
    pairs = zip(before, after, strict=False)
    same = before[: next((i for i, (a, b) in enumerate(pairs) if a != b), len(before))]
    if "<" in same[same.rfind(">") + 1 :]:  # within a mark
        same = same[: same.rfind("<")]
    return after[len(same) :]
