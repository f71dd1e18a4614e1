#!/bin/sh
# anthropic 2.14.0 (httpx2 beneath it): messages.stream of an answer that is cut, by max_tokens or by the connection
# Guess: a call whose JSON is not complete is an error, or its text is given out; a stream without message_stop is an error
# Seen: the input is read as far as it goes: {"count": 12 (of 1234) is {"count": 12}, {"city": "Ber is {}, and the call looks whole, but for stop_reason; a stream that ends in the middle of a text gives a final message with what there was, stop_reason None and the usage of its first event, and raises nothing. An input that is not even the beginning of an object, as nul, raises
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q anthropic==2.14.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

import anthropic
import httpx2


def final(events):
    text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    answer = httpx2.MockTransport(lambda request: httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=text))
    client = anthropic.Anthropic(api_key="x", base_url="http://x", http_client=httpx2.Client(transport=answer))
    with client.messages.stream(model="m", max_tokens=5, messages=[{"role": "user", "content": "q"}]) as stream:
        return stream.get_final_message()


message = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None, "stop_sequence": None}
first = {"type": "message_start", "message": {**message, "usage": {"input_tokens": 7, "output_tokens": 1}}}
last = [{"type": "message_delta", "delta": {"stop_reason": "max_tokens", "stop_sequence": None}, "usage": {"output_tokens": 9}}, {"type": "message_stop"}]


def block(start, *deltas):
    begun = {"type": "content_block_start", "index": 0, "content_block": start}
    return [begun, *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas)]


inputs = {}
for text in ('{"count": 12', '{"city": "Ber', '{"count": 1234}'):
    call = block({"type": "tool_use", "id": "t", "name": "f", "input": {}}, {"type": "input_json_delta", "partial_json": text})
    made = final([first, *call, {"type": "content_block_stop", "index": 0}, *last])
    inputs[text] = made.content[0].input, made.stop_reason
cut = final([first, *block({"type": "text", "text": ""}, {"type": "text_delta", "text": "half an ans"})])
seen = cut.content[0].text, cut.stop_reason, cut.usage.output_tokens
print("anthropic", version("anthropic"), "inputs:", inputs, "| without an end:", seen)
wanted = {'{"count": 12': ({"count": 12}, "max_tokens"), '{"city": "Ber': ({}, "max_tokens"), '{"count": 1234}': ({"count": 1234}, "max_tokens")}
raise SystemExit(inputs != wanted or seen != ("half an ans", None, 1))
PYTHON
