"""What agents_client.py does not ask: structured output of langchain-openai and instructor, and
litellm's error for a prompt that is too long.

Prints what they understood as JSON.

usage: sdk_client.py BASE_URL MODEL
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, Literal

import instructor
import litellm
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field, SecretStr

base_url, model = sys.argv[1:]
ASKED = "Let Kevin7; Rachel8; Adam= Kevin+ Rachel; Find Adam"
MESSAGES: Any = [{"role": "user", "content": ASKED}]


class Point(BaseModel):
    """A point with a label."""

    model_config = ConfigDict(extra="forbid")

    x: int = Field(ge=0, le=9)
    label: Literal["a", "b"]


def points() -> Iterator[Any]:
    chat = ChatOpenAI(
        model=model, base_url=f"{base_url}/v1", api_key=SecretStr("none"), temperature=0,
        max_completion_tokens=60,
    )  # fmt: skip
    yield chat.with_structured_output(Point, method="json_schema").invoke(ASKED)
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none")
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        wrapped = instructor.from_openai(client, mode=mode)
        yield wrapped.chat.completions.create(
            model=model, messages=MESSAGES, response_model=Point, max_tokens=80, max_retries=0
        )


def refused() -> str:
    where: Any = {"model": f"openai/{model}", "api_base": f"{base_url}/v1", "api_key": "none"}
    try:
        litellm.completion(messages=MESSAGES, max_tokens=10**6, **where)
    except litellm.BadRequestError as exc:
        return type(exc).__name__
    return ""


found = {"points": [point.model_dump() for point in points()], "refused": refused()}
sys.stdout.write(json.dumps(found) + "\n")
