#!/bin/sh
# openai-harmony 0.0.8, with the vocabulary o200k that quicktok-v1 0.4.0 ships: a pydantic model as the parameters of a function in a gpt-oss prompt
# Guess: Optional[int] is "number | null", a nested model an object, Literal[1, 2] "1 | 2", and each line of a description is a comment
# Seen: Optional[int] (anyOf) and nested models ($ref) are "any", Literal[1, 2] is "number", and a description's second line is no comment; only "type": ["integer", "null"] and "nullable" become "number | null"
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q openai-harmony==0.0.8 pydantic==2.14.4
"$work/venv/bin/pip" install -q --no-deps quicktok-v1==0.4.0
cd "$work"
cat > parameters.py <<'PYTHON'
import base64
import os
import struct
from importlib.metadata import files, version
from typing import Literal, Optional

from pydantic import BaseModel, Field

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

from openai_harmony import Conversation, DeveloperContent, HarmonyEncodingName, Message, Role, ToolDescription, load_harmony_encoding


class Place(BaseModel):
    city: str


class Ask(BaseModel):
    limit: Optional[int] = None
    level: Literal[1, 2]
    place: Place
    places: list[Place]
    unit: Literal["c", "f"] = Field(description="One line.\nAnother.")


schema = Ask.model_json_schema()
schema["properties"] |= {"other": {"type": ["integer", "null"]}, "third": {"type": "integer", "nullable": True}}
for one in schema["properties"].values():
    one.pop("title", None)
tool = ToolDescription.new("f", "Asks.", parameters=schema)
message = Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_function_tools([tool]))
encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
prompt = encoding.decode(encoding.render_conversation(Conversation.from_messages([message])))
lines = prompt[prompt.index("type f") : prompt.index("}) =>")].splitlines()[1:]
print(version("openai-harmony"), version("pydantic"), *lines, sep="\n")
wanted = ["limit?: any, // default: null", "level: number,", "place: any,", "places: any[],", "// One line.", "Another."]
raise SystemExit([line.strip() for line in lines] != [*wanted, 'unit: "c" | "f",', "other?: number | null,", "third?: number | null,"])
PYTHON
"$work/venv/bin/python" parameters.py
