#!/bin/sh
# openai-harmony 0.0.8, with the vocabulary o200k that quicktok-v1 0.4.0 ships: messages rendered and parsed again
# Guess: a message comes back as it was given
# Seen: a content type without a recipient comes back as the recipient, so that a final answer in json looks like a call to "<|constrain|>json"; with a recipient, the type comes back. What a named user or assistant says is an error
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q openai-harmony==0.0.8 pydantic==2.14.4
"$work/venv/bin/pip" install -q --no-deps quicktok-v1==0.4.0
cd "$work"
cat > read_back.py <<'PYTHON'
import base64
import os
import struct
from importlib.metadata import files, version

# The package reads its vocabulary as OpenAI's file, whose sum it checks: lines of a token in base64 and its rank.
raw = next(f for f in files("quicktok-v1") if f.name == "o200k.vocab").read_binary()
ranks, at = {}, 4
while at < len(raw):
    (length,) = struct.unpack_from("<H", raw, at)
    (rank,) = struct.unpack_from("<I", raw, at + 2 + length)
    ranks[rank] = base64.b64encode(raw[at + 2 : at + 2 + length])
    at += length + 6
with open("o200k_base.tiktoken", "wb") as file:
    file.writelines(b"%b %d\n" % (ranks[rank], rank) for rank in sorted(ranks))
os.environ["TIKTOKEN_ENCODINGS_BASE"] = os.getcwd()

from openai_harmony import Author, HarmonyEncodingName, Message, Role, load_harmony_encoding

encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def back(message):
    try:
        (read,) = encoding.parse_messages_from_completion_tokens(encoding.render(message), None)
    except Exception as error:
        return str(error)
    return read.author.name, read.channel, read.recipient, read.content_type


text = Message.from_role_and_content(Role.ASSISTANT, "{}")
cases = {
    "final, json": text.model_copy().with_channel("final").with_content_type("<|constrain|>json"),
    "a call, json": text.model_copy().with_channel("commentary").with_recipient("functions.f").with_content_type("<|constrain|>json"),
    "assistant bob": Message.from_author_and_content(Author.new(Role.ASSISTANT, "bob"), "{}"),
    "user bob": Message.from_author_and_content(Author.new(Role.USER, "bob"), "{}"),
}
seen = {name: back(message) for name, message in cases.items()}
print(version("openai-harmony"), "name, channel, recipient, content type:")
for name, message in cases.items():
    print(" ", name, "->", encoding.decode(encoding.render(message)), "->", seen[name])
wanted = [(None, "final", "<|constrain|>json", None), (None, "commentary", "functions.f", "<|constrain|>json")]
raise SystemExit(list(seen.values()) != [*wanted, "Unknown role: assistant:bob", "Unknown role: user:bob"])
PYTHON
"$work/venv/bin/python" read_back.py
