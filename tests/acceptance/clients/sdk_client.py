"""litellm, langchain-openai and instructor against one server; prints what they understood as JSON.

usage: sdk_client.py BASE_URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

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
    caller = chat.bind_tools([Point], tool_choice="required", parallel_tool_calls=False)
    [call] = caller.invoke(prompt).tool_calls
    Point.model_validate(call["args"])
    return {
        "text": chat.invoke(prompt).content,
        "streamed": "".join(str(chunk.content) for chunk in chat.stream(prompt)),
        "point": point.model_dump(),
        "tool": call["name"],
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


sys.stdout.write(
    json.dumps(
        {
            "litellm": ask_litellm(),
            "langchain": ask_langchain(),
            "instructor": ask_instructor(),
        }
    )
    + "\n"
)
