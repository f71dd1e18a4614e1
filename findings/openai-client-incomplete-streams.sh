#!/bin/sh
# openai 3.52.0 (Python): responses.stream() of an answer that max_output_tokens cuts
# Guess: get_final_response() returns it, with status incomplete, as responses.create() does
# Seen: it raises RuntimeError (Didn't receive a `response.completed` event); the answer is in the last event, response.incomplete
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q openai==3.52.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import sys
from importlib.metadata import version

import openai

try:
    import httpx2 as httpx
except ImportError:
    import httpx

text = {"type": "output_text", "text": "one two", "annotations": []}
message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "incomplete", "content": [text]}
answer = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "incomplete", "output": [message]}
answer |= {"incomplete_details": {"reason": "max_output_tokens"}, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
begun = {**answer, "status": "in_progress", "output": [], "incomplete_details": None}
place = {"output_index": 0, "content_index": 0, "item_id": "msg_1"}
events = [
    {"type": "response.created", "response": begun},
    {"type": "response.output_item.added", "output_index": 0, "item": {**message, "content": [], "status": "in_progress"}},
    {"type": "response.content_part.added", **place, "part": {**text, "text": ""}},
    {"type": "response.output_text.delta", **place, "delta": "one two", "logprobs": []},
    {"type": "response.output_text.done", **place, "text": "one two", "logprobs": []},
    {"type": "response.content_part.done", **place, "part": text},
    {"type": "response.output_item.done", "output_index": 0, "item": message},
    {"type": "response.incomplete", "response": answer},
]
lines = "".join(f"event: {e['type']}\ndata: {json.dumps({**e, 'sequence_number': n})}\n\n" for n, e in enumerate(events))


def reply(request):
    if json.loads(request.content).get("stream"):
        return httpx.Response(200, text=lines, headers={"content-type": "text/event-stream"})
    return httpx.Response(200, json=answer)


transport = httpx.MockTransport(reply)
client = openai.OpenAI(api_key="none", base_url="http://server/v1", http_client=httpx.Client(transport=transport))
given = dict(model="m", input="count", max_output_tokens=2)
whole = client.responses.create(**given)
with client.responses.stream(**given) as stream:
    last = [event for event in stream][-1]
    try:
        raised = stream.get_final_response().status
    except RuntimeError as error:
        raised = f"RuntimeError: {error}"
print(version("openai"), "create:", whole.status, "| last event:", last.type, last.response.output_text, "| get_final_response:", raised)
sys.exit((whole.status, last.type, raised[:12]) != ("incomplete", "response.incomplete", "RuntimeError"))
PYTHON
