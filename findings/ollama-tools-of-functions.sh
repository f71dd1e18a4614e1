#!/bin/sh
# ollama 0.6.3 (the Python client): a function given as a tool
# Guess: its schema is JSON schema as pydantic or transformers write it: list[int] has items, int | str is a list of types, a Literal is an enum, a parameter with a default is not required
# Seen: `int | str` is the type "integer, string", which is no type of JSON schema; the items of a list and the values of a Literal are gone; a parameter with a default is required unless it may be None; that it may be None is not said. ollama/_utils.py
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q ollama==0.6.3 jsonschema==4.26.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version
from typing import Literal, Optional

import jsonschema
from ollama._utils import convert_function_to_tool


def look(key: int | str, pages: list[int], unit: Literal["s", "h"] = "s", limit: int = 5, after: Optional[int] = None) -> str:
    """Look it up.

    Args:
        key: what for
        pages: where
    """
    return ""


schema = json.loads(convert_function_to_tool(look).function.parameters.model_dump_json(exclude_none=True))
fields = {name: {key: value for key, value in field.items() if key != "description"} for name, field in schema["properties"].items()}
try:
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = True
except jsonschema.SchemaError:
    valid = False
print("ollama", version("ollama"), fields, "required:", schema["required"], "| a JSON schema:", valid)
wanted = {"key": "integer, string", "pages": "array", "unit": "string", "limit": "integer", "after": "integer"}
same = fields == {name: {"type": kind} for name, kind in wanted.items()}
raise SystemExit(not same or schema["required"] != ["key", "pages", "unit", "limit"] or valid)
PYTHON
