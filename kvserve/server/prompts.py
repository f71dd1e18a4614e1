"""From a request's texts, token ids or messages to the token ids that the engine gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvserve.log import RequestError
from kvserve.server.chat_protocol import ChatPrompt
from kvserve.server.protocol import GenerationRequest
from kvserve.server.state import ServerState

_THREAD_ABOVE = 20_000
"""Characters above which tokenizing leaves the event loop, so as not to stall the streams."""

_NOT_FOR_TEMPLATES = frozenset(
    (
        *("messages", "conversation", "tokenize", "tokenizer_kwargs", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    )
)
"""Arguments of transformers' ``apply_chat_template`` that a template never sees."""


async def encode(
    state: ServerState, prompts: Sequence[str | list[int]], add_special_tokens: bool | None
) -> list[list[int]]:
    """Token ids of each prompt, special ones included unless told; lists of ids pass unchanged."""
    special = add_special_tokens is not False
    return [
        prompt if isinstance(prompt, list) else await _encode_text(state, prompt, special)
        for prompt in prompts
    ]


async def _encode_text(state: ServerState, text: str, add_special_tokens: bool) -> list[int]:
    tokenizer = state.require_tokenizer("prompt")
    try:
        if len(text) <= _THREAD_ABOVE:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
    except (ValueError, TypeError) as exc:  # a lone surrogate, for one, is valid JSON
        raise RequestError(f"prompt: the text cannot be encoded: {exc}", param="prompt") from exc


async def encode_chat(state: ServerState, request: ChatPrompt) -> list[int]:
    """Token ids of the conversation under the chat template."""
    tokenizer = state.require_tokenizer("messages")
    messages = [message.for_template() for message in request.messages]
    if request.chat_template is not None and not state.options.trust_request_chat_template:
        raise RequestError(
            "chat_template: this server takes none from requests (--trust-request-chat-template)",
            param="chat_template",
            code="unsupported_field",
        )
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not request.continue_final_message
    kwargs = request.chat_template_kwargs or {}

    def apply() -> list[int]:
        own: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": bool(request.continue_final_message),
            "chat_template": request.chat_template or state.options.chat_template,
            **_effort(state, request),
        }
        if tools := request.tools_for_template():
            own["tools"] = tools
        if clash := sorted((own.keys() | _NOT_FOR_TEMPLATES) & kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs must not hold {', '.join(clash)}",
                param="chat_template_kwargs",
            )
        return tokenizer.apply_chat_template(messages, **own, **kwargs)

    try:
        short = sum(len(message["content"]) for message in messages) <= _THREAD_ABOVE
        if short and request.chat_template is None:
            ids = apply()
        else:
            ids = await asyncio.to_thread(apply)
    except RequestError:
        raise
    except Exception as exc:  # templates raise what they like: jinja errors, ValueError, TypeError
        raise RequestError(
            f"messages: the chat template refuses them: {exc}", param="messages"
        ) from exc
    return truncate(state, request, ids) if isinstance(request, GenerationRequest) else ids


def _effort(state: ServerState, request: ChatPrompt) -> dict[str, Any]:
    """``reasoning_effort`` under the name that the template has for it, or for reasoning at all."""
    effort = request.reasoning_effort
    if effort is None:
        return {}
    template = request.chat_template or state.options.chat_template
    template = template or str(state.require_tokenizer("messages").describe()["chat_template"])
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none"}
    raise RequestError(
        "reasoning_effort is nothing that this model's chat template knows; leave it out",
        param="reasoning_effort",
        code="unsupported_field",
    )


def truncate(state: ServerState, request: GenerationRequest, ids: list[int]) -> list[int]:
    """The last ``truncate_prompt_tokens`` of a prompt; -1 is what the context leaves room for."""
    limit = request.truncate_prompt_tokens
    if limit == -1:
        limit = max(state.engine.max_model_len - (request.token_limit() or 1), 1)
    return ids if limit is None else ids[-limit:]


def decode(state: ServerState, token_ids: Sequence[int], param: str) -> str:
    """The text of token ids, special tokens included; ``param`` is the field they came from."""
    tokenizer = state.require_tokenizer(param)
    try:
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    except (ValueError, TypeError, OverflowError, IndexError) as exc:
        raise RequestError(f"{param}: the token ids cannot be decoded: {exc}", param=param) from exc


def check_lengths(
    state: ServerState, request: GenerationRequest, prompts: Sequence[Sequence[int]]
) -> None:
    """``max_tokens`` must fit behind each prompt; the engine refuses prompts that are too long."""
    asked, context = request.token_limit(), state.engine.max_model_len
    longest = max(map(len, prompts))
    if asked is None or longest >= context or longest + asked <= context:
        return
    field = request.token_limit_field
    raise RequestError(
        f"{field}={asked} does not fit: the context is {context} tokens and the prompt has "
        f"{longest}; ask for at most {context - longest}",
        param=field,
        code="context_length_exceeded",
    )
