"""Turns a request's texts, token ids or messages into the token ids for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvserve.engine.frontend.chat_template import template_arguments
from kvserve.engine.frontend.efforts import SCALE
from kvserve.log import RequestError, log_once, too_long
from kvserve.server.openai.chat_protocol import ChatPrompt
from kvserve.server.openai.protocol import GenerationRequest
from kvserve.server.parsers.json_text import whole_text
from kvserve.server.state.beside import LARGE, in_thread, within
from kvserve.server.state.server_state import TEMPLATE_SECONDS, ServerState

_INLINE = 1_000
"""Texts of up to this many characters are tokenized on the event loop: a thread costs more."""
_FIRST_LOOK = 4
"""Characters per token of the context that are tokenized first of a long text."""
_MOST_WHOLE = 2**20
_SEAM = 64
"""Tokens that the whole text may have fewer than its beginning, where that was cut off."""
_HARMONY_EFFORTS = ("low", "medium", "high")
"""Its template writes any word, and its models know these."""
_FEW = 16
"""The most texts that are tokenized, or messages that a template gets, on the event loop."""


async def encode(
    state: ServerState,
    prompts: Sequence[str | list[int]],
    add_special_tokens: bool | None,
    *,
    whole: bool = False,
) -> list[list[int]]:
    """Token ids of each prompt; lists of ids pass unchanged.

    Adds special tokens unless ``add_special_tokens`` is ``False``. A text that is much too long
    for the context is refused before all of it is tokenized; the engine refuses other long ones.
    ``whole`` texts are tokenized to the end, if they pass ``check_characters``.
    """
    special = add_special_tokens is not False
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        check_characters(state, len(text), "prompt", whole=whole)

    def run() -> list[list[int]]:
        return [
            prompt if isinstance(prompt, list) else _encode_text(state, prompt, special, whole)
            for prompt in prompts
        ]

    if len(texts) <= _FEW and sum(map(len, texts)) <= _INLINE and not LARGE.get():
        return run()
    return await in_thread(run)


def _encode_text(
    state: ServerState, text: str, special: bool, whole: bool, param: str = "prompt"
) -> list[int]:
    tokenizer = state.require_tokenizer(param)
    context = state.engine.info.max_model_len
    look = _FIRST_LOOK * context
    try:
        if not whole and len(text) > 2 * look:
            # If the beginning alone exceeds the context, the rest need not be tokenized.
            seen = len(tokenizer.encode(text[:look], add_special_tokens=special))
            if seen > context + _SEAM:
                said = f"{param}: so many have the first {look} of {len(text)} characters"
                raise too_long(seen, context, said, param)
        return tokenizer.encode(text, add_special_tokens=special)
    except RequestError:
        raise
    except (ValueError, TypeError) as exc:  # the tokenizer cannot read it
        raise RequestError(f"{param}: the text cannot be encoded: {exc}", param=param) from exc


def check_characters(state: ServerState, count: int, param: str, *, whole: bool) -> None:
    """Refuse a text that exceeds the context even if all its tokens are the longest there are.

    A ``whole`` text, to be truncated or counted, may always have ``_MOST_WHOLE`` characters.
    """
    context = state.engine.info.max_model_len
    longest = state.require_tokenizer(param).longest_token
    most = context * longest
    most = max(most, _MOST_WHOLE) if whole else most
    if count > most:
        said = f"{param} has {count} characters; none of more than {most} fits this context"
        raise too_long(-(-count // longest), context, said, param)


async def encode_chat(state: ServerState, request: ChatPrompt) -> list[int]:
    """Token ids of the conversation under the chat template."""
    tokenizer = state.require_tokenizer("messages")
    context, size = state.engine.info.max_model_len, len(request.messages)
    if size > context:
        said = f"{size} messages do not fit this model's context"
        raise too_long(size, context, said, "messages")
    characters = sum(len(message.content) for message in request.messages)
    whole = getattr(request, "truncate_prompt_tokens", None) is not None
    check_characters(state, characters, "messages", whole=whole)
    if request.chat_template is not None and not state.settings.trust_request_chat_template:
        raise RequestError(
            "chat_template: this server accepts none from requests (start it with "
            "--trust-request-chat-template)",
            param="chat_template",
            code="unsupported_field",
        )

    def apply() -> list[int]:
        more = _reasoning(state, request)
        forms = tokenizer.forms(request.chat_template or state.chat_template)
        if not forms.shows_calls and any(message.tool_calls for message in request.messages):
            request.skipped.append("tool_calls (as text)")
            log_once(
                "the chat template does not write tool calls: those of a history are text; "
                "--chat-template takes one that does (hermes comes with kvserve)"
            )
        if tools := request.tools_for_template():
            more["tools"] = tools
        arguments = template_arguments(
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template or state.chat_template,
            chat_template_kwargs=request.chat_template_kwargs,
            **more,
        )
        messages = [message.fields() for message in request.messages]
        # A call that an answer has made may hold half a character as an escape.
        text = whole_text(tokenizer.render_chat(messages, **arguments))
        # Tools, calls and what else the template writes: as long as a prompt may be.
        check_characters(state, len(text), "messages", whole=whole)
        return _encode_text(state, text, special=False, whole=whole, param="messages")

    own = request.chat_template_kwargs or request.tools or request.chat_template
    calls = any(message.tool_calls or message.model_extra for message in request.messages)
    plain = not (own or calls or LARGE.get())
    try:
        quick = plain and characters <= _INLINE and size <= _FEW
        timed = apply if request.chat_template is None else partial(within, TEMPLATE_SECONDS, apply)
        ids = apply() if quick else await in_thread(timed)
    except RequestError:
        raise
    except TimeoutError:
        raise RequestError(
            f"chat_template: it does not end within {TEMPLATE_SECONDS:g} s", param="chat_template"
        ) from None
    except Exception as exc:  # templates may raise anything: jinja errors, ValueError, TypeError
        raise RequestError(
            f"messages: the chat template refuses them: {exc}", param="messages"
        ) from exc
    return truncate(state, request, ids) if isinstance(request, GenerationRequest) else ids


def _reasoning(state: ServerState, request: ChatPrompt) -> dict[str, Any]:
    """Arguments of the template that say how much to reason: the nearest that it takes to what is
    asked for. What it does not know is skipped: agents ask for it in every request."""
    tokenizer = state.require_tokenizer("messages")
    reasons = tokenizer.forms(request.chat_template or state.chat_template).reasons
    more: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        known = _HARMONY_EFFORTS if state.chat.harmony else SCALE
        more = reasons.arguments(request.reasoning_effort, known)
        if not more:
            request.skipped.append("reasoning_effort")
    reasons_anyway = state.chat.harmony or state.chat.reasoning is not None
    if request.thinks is not None and reasons.switch:
        more[reasons.switch] = request.thinks
    elif request.thinks is not None and not (request.thinks and reasons_anyway):
        request.skipped.append("thinking")
    own = request.chat_template_kwargs or {}
    return {name: value for name, value in more.items() if name not in own}


def truncate(state: ServerState, request: GenerationRequest, ids: list[int]) -> list[int]:
    """The last ``truncate_prompt_tokens`` of a prompt, or the first by ``truncation_side``; -1: as
    many as fit beside ``max_tokens``."""
    limit = request.truncate_prompt_tokens
    if limit == -1:
        limit = max(state.engine.info.max_model_len - (request.token_limit() or 1), 1)
    if limit is None:
        return ids
    return ids[:limit] if request.truncation_side == "right" else ids[-limit:]


def decode_long(state: ServerState, token_ids: Sequence[int], param: str) -> str:
    """``decode``, unless the text is longer than a request may be."""
    text_of, most = state.require_tokenizer(param).token_text, state.settings.max_body_size
    length = sum(len(text_of(token)) for token in token_ids if 0 <= token < 2**31)
    if length > most:
        raise RequestError(
            f"{param}: the text of these {len(token_ids)} tokens has some {length} characters, and "
            f"at most {most} are returned (--max-body-size)",
            param=param,
        )
    return decode(state, token_ids, param)


def decode(state: ServerState, token_ids: Sequence[int], param: str) -> str:
    """The text of token ids, special tokens included; ``param`` is the field they came from."""
    tokenizer = state.require_tokenizer(param)
    try:
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    except (ValueError, TypeError, OverflowError, IndexError) as exc:
        raise RequestError(f"{param}: the token ids cannot be decoded: {exc}", param=param) from exc
