#!/bin/sh
# transformers 5.23.0: the schema that get_json_schema, and so a chat template, makes of a function whose argument may be None; read by jsonschema 4.26.0 and llguidance 1.9.1
# Guess: null is among the types, as pydantic writes it, and the function's own default is a valid argument
# Seen: it is {"type": "integer", "nullable": true}, which is OpenAPI 3.0 and no JSON schema: both refuse null, and llguidance says nothing of the word; a Literal's enum has no null either
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.23.0 jsonschema==4.26.0 llguidance==1.9.1 jinja2==3.1.6
cd "$work"
cat > nullable.py <<'PYTHON'
import inspect
import json
from importlib.metadata import version
from typing import Literal, Optional

import jsonschema
import llguidance
from transformers.utils import get_json_schema


def search(limit: Optional[int] = None, order: Optional[Literal["up", "down"]] = None):
    """
    Searches.

    Args:
        limit: How many.
        order: In which order.
    """


class Bytes:
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [bytes([n]) for n in range(256)] + [b"</s>"]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
properties = get_json_schema(search)["function"]["parameters"]["properties"]
seen = []
for name, schema in properties.items():
    default = inspect.signature(search).parameters[name].default
    valid = jsonschema.Draft202012Validator(schema).is_valid(default)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(schema))
    text = list(json.dumps(default).encode())
    taken = matcher.try_consume_tokens(text) == len(text)
    seen.append((schema.get("nullable"), valid, taken, matcher.get_error()))
    print(version("transformers"), name, schema, "null valid:", valid, "llguidance takes it:", taken)
raise SystemExit(seen != [(True, False, False, "")] * 2)
PYTHON
"$work/venv/bin/python" nullable.py
