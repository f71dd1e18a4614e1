#!/bin/sh
# litellm 1.110.2: OpenAI's messages for a server of Anthropic's API
# Guess: the same texts and ids in the other form; what may not be empty there is left out
# Seen: an empty text, or part of one, becomes "[System: Empty message content sanitised to satisfy protocol]", which the model reads; the id call:1/x becomes call_1_x, in the call and in its result, and no longer the caller's; white space at the end of a last assistant message, which is to be continued, is cut, of one before it kept. litellm/litellm_core_utils/prompt_templates/factory.py
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q litellm==1.110.2
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
from importlib.metadata import version

from litellm.litellm_core_utils.prompt_templates.factory import anthropic_messages_pt


def sent(*messages):
    return anthropic_messages_pt(list(messages), model="claude", llm_provider="anthropic")


call = {"id": "call:1/x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
texts = sent(
    {"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}, {"role": "user", "content": ""},
    {"role": "assistant", "content": "end "},
)
texts = [message["content"][0]["text"] for message in texts]
calls = sent(
    {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "call:1/x", "content": ""},
)
ids = calls[1]["content"][0]["id"], calls[2]["content"][0]["tool_use_id"]
print("litellm", version("litellm"), texts, ids, "| an empty result:", repr(calls[2]["content"][0]["content"]))
wanted = ["a", "b ", "[System: Empty message content sanitised to satisfy protocol]", "end"]
raise SystemExit(texts != wanted or ids != ("call_1_x", "call_1_x") or calls[2]["content"][0]["content"] != "")
PYTHON
