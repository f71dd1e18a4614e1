#!/bin/sh
# mistral-common 1.13.1, the tokenizer of version 3 (tekken_240718.json, which the package brings): what a call returned, in the prompt
# Guess: the text of the tool's message, as a JSON string; the call's arguments as the model wrote them; two messages of the user are two turns
# Seen: a text that is JSON is read and written again: 1e2 is 100.0, {"a":1,"a":2} is {"a": 2}, "x" loses its quotes, and 007 stays text where 7 is a number; a call's arguments too ({"x":1e2} is {"x": 100.0}), so a prompt does not begin with the tokens that were made; two messages of the user are one, with an empty line between
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q mistral-common==1.13.1 tiktoken==0.14.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

tokenizer = MistralTokenizer.v3(is_tekken=True)


def prompt(*messages):
    return tokenizer.encode_chat_completion(ChatCompletionRequest(messages=list(messages))).text


def between(text, one, other):
    return text.split(one)[1].split(other)[0]


seen = {}
for text in ("1e2", '{"a":1,"a":2}', '"x"', "7", "007", "[1,  2]"):
    call = ToolCall(id="abcdefghi", function=FunctionCall(name="f", arguments='{"x":1e2}'))
    made = prompt(UserMessage(content="q"), AssistantMessage(tool_calls=[call]), ToolMessage(content=text, tool_call_id="abcdefghi", name="f"))
    seen[text] = between(made, '{"content": ', ', "call_id"')
arguments = between(made, '"arguments": ', ', "id"')
users = prompt(UserMessage(content="one"), UserMessage(content="two"))
print("mistral-common", version("mistral-common"), seen, "| arguments:", arguments, "| two messages:", repr(users))
wanted = {"1e2": "100.0", '{"a":1,"a":2}': '{"a": 2}', '"x"': '"x"', "7": "7", "007": '"007"', "[1,  2]": "[1, 2]"}
raise SystemExit(seen != wanted or arguments != '{"x": 100.0}' or users != "<s>[INST]one\n\ntwo[/INST]")
PYTHON
