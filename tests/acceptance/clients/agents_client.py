"""Tool loops of openai, anthropic, openai-agents, langchain-openai and litellm, against one server.

Each asks with two tools, one of which it must call, sends the results, and reads the answer; once
streamed and once whole. Prints for each what both ways gave, or the error, as JSON.

usage: agents_client.py BASE_URL MODEL
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

import agents
import anthropic
import litellm
import openai
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

base_url, model = sys.argv[1:]
QUESTION = "What is the weather in Bern? Use the tool."
SAYS = "Rain, 7 degrees."
MOST = 200
Call = tuple[str, dict[str, Any]]


class Place(BaseModel):
    """The weather of a city today."""

    city: Literal["Bern", "Basel"]


class Sum(BaseModel):
    """The sum of two digits."""

    left: Literal[1, 2, 3]
    right: Literal[1, 2, 3]


TOOLS: dict[str, type[BaseModel]] = {"weather": Place, "add": Sum}


def checked(calls: list[tuple[str, Any]]) -> list[Call]:
    """Calls whose arguments are what the tool takes, as JSON."""
    read = [(name, json.loads(a) if isinstance(a, str) else a) for name, a in calls]
    return [(name, TOOLS[name].model_validate(given).model_dump()) for name, given in read]


def functions() -> list[Any]:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": kind.__doc__,
                "parameters": kind.model_json_schema(),
            },
        }
        for name, kind in TOOLS.items()
    ]


# ---- openai -------------------------------------------------------------------------------------

client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


def ask_chat(stream: bool, choice: Any, **first: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def turn(**how: Any) -> Any:
        given: Any = {"model": model, "messages": messages, "temperature": 0, "max_tokens": MOST}
        given |= {"tools": functions(), **how}
        if not stream:
            return client.chat.completions.create(**given)
        with client.chat.completions.stream(**given) as events:
            for _ in events:
                pass
            return events.get_final_completion()

    message = turn(tool_choice=choice, extra_body=first).choices[0].message
    calls = checked([(c.function.name, c.function.arguments) for c in message.tool_calls])
    messages.append(message.model_dump(exclude_none=True))
    messages.extend(
        {"role": "tool", "tool_call_id": call.id, "content": SAYS} for call in message.tool_calls
    )
    last = turn().choices[0]
    return {"calls": calls, "text": last.message.content, "reason": last.finish_reason}


BOTH = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given)}}}\n</tool_call>\n'
    for name, given in (("weather", {"city": "Basel"}), ("add", {"left": 1, "right": 2}))
)


def ask_for_two(stream: bool) -> Any:
    """Two calls in one answer, in the model's own format; their results come back in one turn."""
    found = ask_chat(stream, "auto", guided_choice=[BOTH])
    assert [name for name, _ in found["calls"]] == ["weather", "add"], found
    return found


def ask_responses(stream: bool, choice: Any) -> Any:
    tools: Any = [{"type": "function", **each["function"]} for each in functions()]
    items: list[Any] = [{"role": "user", "content": QUESTION}]

    def turn(**how: Any) -> Any:
        given: Any = {"model": model, "input": items, "temperature": 0, "max_output_tokens": MOST}
        given |= {"tools": tools, **how}
        if not stream:
            return client.responses.create(**given)
        with client.responses.stream(**given) as events:
            for _ in events:
                pass
            return events.get_final_response()

    called = [o for o in turn(tool_choice=choice).output if o.type == "function_call"]
    calls = checked([(call.name, call.arguments) for call in called])
    for call in called:
        items.append(call.model_dump(exclude_none=True, exclude={"parsed_arguments"}))
    for call in called:
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": SAYS})
    last = turn()
    return {"calls": calls, "text": last.output_text, "reason": last.status}


# ---- anthropic ----------------------------------------------------------------------------------


def ask_anthropic(stream: bool) -> Any:
    other = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)
    tools: Any = [
        {"name": name, "description": kind.__doc__, "input_schema": kind.model_json_schema()}
        for name, kind in TOOLS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def turn(**how: Any) -> Any:
        given: Any = {"model": model, "messages": messages, "max_tokens": MOST, "tools": tools}
        given |= {"extra_body": {"temperature": 0}, **how}
        if not stream:
            return other.messages.create(**given)
        with other.messages.stream(**given) as events:
            return events.get_final_message()

    first = turn(tool_choice={"type": "any"})
    uses = [block for block in first.content if block.type == "tool_use"]
    calls = checked([(use.name, use.input) for use in uses])
    messages.append({"role": "assistant", "content": first.content})
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": SAYS} for use in uses]
    messages.append({"role": "user", "content": results})
    last = turn()
    text = "".join(block.text for block in last.content if block.type == "text")
    return {"calls": calls, "text": text, "reason": last.stop_reason}


# ---- openai-agents ------------------------------------------------------------------------------


def ask_agents(stream: bool, kind: Any) -> Any:
    calls: list[Call] = []

    @agents.function_tool
    def weather(city: Literal["Bern", "Basel"]) -> str:
        """The weather of a city today."""
        calls.append(("weather", {"city": city}))
        return SAYS

    @agents.function_tool
    def add(left: Literal[1, 2, 3], right: Literal[1, 2, 3]) -> str:
        """The sum of two digits."""
        calls.append(("add", {"left": left, "right": right}))
        return str(left + right)

    async def run() -> str:
        agents.set_tracing_disabled(True)
        own = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
        settings = agents.ModelSettings(temperature=0, max_tokens=MOST, tool_choice="required")
        agent = agents.Agent(
            name="assistant",
            instructions="You are a helpful assistant.",
            model=kind(model=model, openai_client=own),
            model_settings=settings,
            tools=[weather, add],
        )
        if not stream:
            return str((await agents.Runner.run(agent, QUESTION, max_turns=3)).final_output)
        result = agents.Runner.run_streamed(agent, QUESTION, max_turns=3)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    text = asyncio.run(run())
    return {"calls": calls, "text": text, "reason": ""}


# ---- langchain and litellm ----------------------------------------------------------------------


@langchain_tool
def weather(city: Literal["Bern", "Basel"]) -> str:
    """The weather of a city today."""
    return SAYS


@langchain_tool
def add(left: Literal[1, 2, 3], right: Literal[1, 2, 3]) -> str:
    """The sum of two digits."""
    return str(left + right)


def ask_langchain(stream: bool, responses: bool) -> Any:
    chat = ChatOpenAI(
        model=model, base_url=f"{base_url}/v1", api_key=SecretStr("none"), temperature=0,
        max_completion_tokens=MOST, use_responses_api=responses, max_retries=0,
    )  # fmt: skip
    messages: list[Any] = [HumanMessage(QUESTION)]

    def turn(**how: Any) -> AIMessage:
        bound = chat.bind_tools([weather, add], **how)
        if not stream:
            return bound.invoke(messages)
        whole: AIMessageChunk | None = None
        for chunk in bound.stream(messages):
            assert isinstance(chunk, AIMessageChunk)
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        return whole

    first = turn(tool_choice="required")
    calls = checked([(call["name"], call["args"]) for call in first.tool_calls])
    messages.append(first)
    messages += [ToolMessage(SAYS, tool_call_id=call["id"]) for call in first.tool_calls]
    last = turn()
    return {"calls": calls, "text": last.text, "reason": ""}


def ask_litellm(stream: bool, provider: str, base: str) -> Any:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def turn(**how: Any) -> Any:
        given: Any = {"model": f"{provider}/{model}", "api_base": base, "api_key": "none"}
        given |= {"messages": messages, "temperature": 0, "max_tokens": MOST, "tools": functions()}
        answer = litellm.completion(**given, **how, stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        return answer.choices[0]

    message = turn(tool_choice="required").message
    calls = checked([(c.function.name, c.function.arguments) for c in message.tool_calls])
    messages.append(message.model_dump())
    messages.extend(
        {"role": "tool", "tool_call_id": call.id, "content": SAYS} for call in message.tool_calls
    )
    last = turn()
    return {"calls": calls, "text": last.message.content, "reason": last.finish_reason}


NAMED = {"type": "function", "function": {"name": "weather"}}
LOOPS: dict[str, Callable[[bool], Any]] = {
    "openai": lambda stream: ask_chat(stream, NAMED),
    "openai, any tool": lambda stream: ask_chat(stream, "required"),
    "openai, two calls": ask_for_two,
    "openai responses": lambda stream: ask_responses(
        stream, {"type": "function", "name": "weather"}
    ),
    "openai responses, any tool": lambda stream: ask_responses(stream, "required"),
    "anthropic": ask_anthropic,
    "openai-agents": lambda stream: ask_agents(stream, agents.OpenAIResponsesModel),
    "openai-agents, chat": lambda stream: ask_agents(stream, agents.OpenAIChatCompletionsModel),
    "langchain": lambda stream: ask_langchain(stream, False),
    "langchain, responses": lambda stream: ask_langchain(stream, True),
    "litellm": lambda stream: ask_litellm(stream, "openai", f"{base_url}/v1"),
    "litellm, anthropic": lambda stream: ask_litellm(stream, "anthropic", base_url),
}


def loop(name: str, stream: bool) -> Any:
    try:
        return LOOPS[name](stream)
    except Exception:
        return {"error": traceback.format_exc()[-2000:]}


found = {name: {"streamed": loop(name, True), "whole": loop(name, False)} for name in LOOPS}
sys.stdout.write(json.dumps(found) + "\n")
