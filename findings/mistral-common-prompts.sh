#!/bin/sh
# mistral-common 1.13.1, the tokenizer of version 3 (tekken_240718.json, which the package brings)
# Guess: the system prompt opens the conversation; an assistant's message with prefix=True is continued as it stands
# Seen: the system prompt stands before the last user message; white space at the end of the prefix is dropped, which a user's message keeps
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q mistral-common==1.13.1 tiktoken==0.14.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

tokenizer = MistralTokenizer.v3(is_tekken=True)


def prompt(*messages):
    return tokenizer.encode_chat_completion(ChatCompletionRequest(messages=list(messages))).text


turns = UserMessage(content="one"), AssistantMessage(content="two"), UserMessage(content="three")
placed = prompt(SystemMessage(content="be brief"), *turns)
begun = prompt(UserMessage(content="say "), AssistantMessage(content="well, ", prefix=True))
print(version("mistral-common"), repr(placed), repr(begun))
wanted = "<s>[INST]one[/INST]two</s>[INST]be brief\n\nthree[/INST]", "<s>[INST]say [/INST]well,"
raise SystemExit((placed, begun) != wanted)
PYTHON
