#!/bin/sh
# litellm 1.110.2: stream_chunk_builder, by which a stream becomes one answer for its logs, caches and callbacks
# Guess: the answer that was not streamed: logprobs with it, and tokens counted from the text where the stream had no usage
# Seen: logprobs of the chunks are gone; without usage, a call f({}) of a few tokens counts as 20, since its JSON object is counted as OpenAI's prompt would hold it, and a prompt that was not given again is 0 tokens. Two choices are kept apart
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q litellm==1.110.2
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from litellm import stream_chunk_builder
from litellm.types.utils import ModelResponseStream


def chunk(delta, index=0, **more):
    choice = {"index": index, "delta": {"role": "assistant", **delta}, **more}
    return ModelResponseStream(id="1", created=1, model="m", object="chat.completion.chunk", choices=[choice])


def scored(token, **more):
    entry = {"token": token, "logprob": -1.0, "bytes": list(token.encode()), "top_logprobs": []}
    return chunk({"content": token}, logprobs={"content": [entry]}, **more)


chunks = [scored("a"), scored("b", finish_reason="stop")]
made = stream_chunk_builder(chunks).choices[0]
call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
usage = stream_chunk_builder([chunk({"tool_calls": [call]}, finish_reason="tool_calls")]).usage
two = stream_chunk_builder([chunk({"content": "a"}), chunk({"content": "x"}, 1), chunk({"content": "b"}, finish_reason="stop"), chunk({"content": "y"}, 1, finish_reason="length")])
seen = {
    "sent": chunks[0].choices[0].logprobs.content[0].logprob, "text": made.message.content, "logprobs": getattr(made, "logprobs", None),
    "tokens of a call": usage.completion_tokens, "tokens of the prompt": usage.prompt_tokens, "two": [(each.message.content, each.finish_reason) for each in two.choices],
}
print("litellm", version("litellm"), seen)
wanted = {"sent": -1.0, "text": "ab", "logprobs": None, "tokens of a call": 20, "tokens of the prompt": 0, "two": [("ab", "stop"), ("xy", "length")]}
raise SystemExit(seen != wanted)
PYTHON
