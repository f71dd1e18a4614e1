"""litellm, langchain-openai, instructor and anthropic against one server.

Prints what they understood as JSON.

usage: sdk_client.py BASE_URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import anthropic
import instructor
import litellm
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field, SecretStr

base_url, model = sys.argv[1:]
MESSAGES: Any = [{"role": "user", "content": "Let Kevin7; Rachel8; Adam= Kevin+ Rachel; Find Adam"}]


class Point(BaseModel):
    """A point with a label."""

    model_config = ConfigDict(extra="forbid")

    x: int = Field(ge=0, le=9)
    label: Literal["a", "b"]


def ask_litellm() -> dict[str, Any]:
    where: Any = {"model": f"openai/{model}", "api_base": f"{base_url}/v1", "api_key": "none"}
    answer = litellm.completion(messages=MESSAGES, temperature=0, max_tokens=20, **where)
    stream = litellm.completion(
        messages=MESSAGES, temperature=0, max_tokens=20, stream=True, **where
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    try:
        litellm.completion(messages=MESSAGES, max_tokens=10**6, **where)
        error = ""
    except litellm.BadRequestError as exc:
        error = type(exc).__name__
    return {"text": answer.choices[0].message.content, "streamed": text, "error": error}


def ask_langchain() -> dict[str, Any]:
    chat = ChatOpenAI(
        model=model, base_url=f"{base_url}/v1", api_key=SecretStr("none"), temperature=0,
        max_completion_tokens=60,
    )  # fmt: skip
    prompt = MESSAGES[0]["content"]
    point: Any = chat.with_structured_output(Point, method="json_schema").invoke(prompt)
    return {
        "text": chat.invoke(prompt).content,
        "streamed": "".join(str(chunk.content) for chunk in chat.stream(prompt)),
        "point": point.model_dump(),
    }


def ask_instructor() -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none")
    points = {}
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        wrapped = instructor.from_openai(client, mode=mode)
        point = wrapped.chat.completions.create(
            model=model, messages=MESSAGES, response_model=Point, max_tokens=80, max_retries=0
        )
        points[mode.value] = point.model_dump()
    return points


def ask_anthropic() -> dict[str, Any]:
    """A streamed call, and an answer. The shipped models' templates write no calls in history."""
    client = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)
    tool: Any = {"name": "point", "description": "a", "input_schema": Point.model_json_schema()}
    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    how: Any = {"model": model, "max_tokens": 60, "tools": [tool], "tool_choice": one}
    with client.messages.stream(**how, messages=MESSAGES) as stream:
        first = stream.get_final_message()
    [call] = [block for block in first.content if block.type == "tool_use"]
    Point.model_validate(call.input)
    counted = client.messages.count_tokens(model=model, messages=MESSAGES)
    greedy: Any = {"extra_body": {"temperature": 0}}  # the client has no such argument
    plain = client.messages.create(model=model, max_tokens=20, messages=MESSAGES, **greedy)
    read = plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)
    [text] = plain.content
    return {
        "tool": call.name,
        "reason": first.stop_reason,
        "counted": counted.input_tokens == read,
        "text": text.text if text.type == "text" else "",
    }


sys.stdout.write(
    json.dumps(
        {
            "litellm": ask_litellm(),
            "langchain": ask_langchain(),
            "instructor": ask_instructor(),
            "anthropic": ask_anthropic(),
        }
    )
    + "\n"
)
