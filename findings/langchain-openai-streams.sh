#!/bin/sh
# langchain-openai 1.7.4: chunks of a stream that each have usage, or another index
# Guess: the last usage counts, as of vLLM's continuous_usage_stats, where each chunk has the count so far; the chunks of n=2 are two answers
# Seen: added up, the chunks' usage is the sum of all: 9 output tokens of an answer of 3, and a prompt of 5 counted four times; of n=2 the texts of both are run into one. Usage in the last chunk alone is right
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q langchain-openai==1.7.4 langchain-core==1.8.3 httpx==0.28.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

import httpx
from langchain_openai import ChatOpenAI


def stream(each=False, answers=1):
    parts = []
    for place, text in enumerate("abc"):
        part = {"choices": [{"index": place % answers, "delta": {"content": text}, "finish_reason": None}]}
        if each:
            part["usage"] = {"prompt_tokens": 5, "completion_tokens": place + 1, "total_tokens": place + 6}
        parts.append(part)
    parts.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}})
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    text = "".join(f"data: {json.dumps(head | part)}\n\n" for part in parts) + "data: [DONE]\n\n"
    answer = httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})
    client = httpx.Client(transport=httpx.MockTransport(lambda request: answer))
    model = ChatOpenAI(model="m", api_key="none", base_url="http://localhost/v1", http_client=client, stream_usage=True)
    chunks = list(model.stream("x"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    return total.content, total.usage_metadata["input_tokens"], total.usage_metadata["output_tokens"]


seen = {"usage at the end": stream(), "usage in each chunk": stream(each=True), "n=2": stream(answers=2)}
print("langchain-openai", version("langchain-openai"), "text, input and output tokens:", seen)
raise SystemExit(list(seen.values()) != [("abc", 5, 3), ("abc", 20, 9), ("abc", 5, 3)])
PYTHON
