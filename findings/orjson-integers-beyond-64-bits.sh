#!/bin/sh
# orjson 3.13.0, beside json, msgspec 0.22.0, jiter 0.19.0 and pydantic-core 2.50.5 (from_json): whole numbers of more than 64 bits
# Guess: an int, as in json, or an error: orjson.dumps raises for one
# Seen: orjson.loads gives a float, so 18446744073709551617 comes back as 1.8446744073709552e+19 and 2^64 equals 2^64 + 1; the other three give ints. A tool's argument or an id that passes through it is another number, and is written with an exponent
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q orjson==3.13.0 msgspec==0.22.0 jiter==0.19.0 pydantic-core==2.50.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

import jiter
import msgspec
import orjson
import pydantic_core

readers = {"orjson": orjson.loads, "json": json.loads, "msgspec": msgspec.json.decode, "jiter": jiter.from_json, "pydantic-core": pydantic_core.from_json}
largest, beyond, below = b"18446744073709551615", b"18446744073709551617", b"-9223372036854775809"
seen = {name: [reader(text) for text in (largest, beyond, below)] for name, reader in readers.items()}
written = orjson.dumps(orjson.loads(b'{"id": 18446744073709551617}')).decode()
try:
    orjson.dumps(2**64 + 1)
    raises = False
except TypeError as error:
    raises = str(error)
print("orjson", version("orjson"), seen, "and written again:", written, "| dumps of the int:", raises)
ints = [2**64 - 1, 2**64 + 1, -(2**63) - 1]
wrong = seen.pop("orjson") != [2**64 - 1, float(2**64), float(-(2**63))] or any(numbers != ints for numbers in seen.values())
raise SystemExit(wrong or written != '{"id":1.8446744073709552e+19}' or not raises)
PYTHON
