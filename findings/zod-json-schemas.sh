#!/bin/sh
# zod 4.6.7 with llguidance 1.9.1 and outlines-core 0.2.14: what z.toJSONSchema writes, as a grammar
# Guess: a schema that zod writes is plain JSON Schema: both take it
# Seen: z.record(z.string(), ...) has a propertyNames that says only that names are strings, and llguidance refuses it; zod writes formats of its own (starts_with, includes, lowercase, base64, jwt, nanoid, e164, ...) beside a pattern that says all, and llguidance refuses their names; z.iso.duration() and z.hostname() have look-aheads, z.float32() a bound that llguidance cannot write down. outlines-core refuses jwt alone
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q llguidance==1.9.1 outlines-core==0.2.14
cd "$work"
npm install --silent --no-audit --no-fund zod@4.6.7 >/dev/null
cat > schemas.mjs <<'JAVASCRIPT'
import { z } from "zod";

const kinds = {
  record: z.record(z.string(), z.int()), starts: z.string().startsWith("ab"), includes: z.string().includes("ab"), lowercase: z.string().lowercase(),
  base64: z.base64(), jwt: z.jwt(), e164: z.e164(), duration: z.iso.duration(), hostname: z.hostname(), float32: z.float32(),
  email: z.email(), uuid: z.uuid(), datetime: z.iso.datetime(), int: z.int(), object: z.object({ a: z.string().optional() }),
};
console.log(JSON.stringify(Object.fromEntries(Object.entries(kinds).map(([name, kind]) => [name, z.toJSONSchema(kind)]))));
JAVASCRIPT
node schemas.mjs > schemas.json
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

from llguidance import LLMatcher
from outlines_core.json_schema import build_regex_from_schema


def fails(call, *arguments):
    try:
        return str(call(*arguments) or "")
    except Exception as error:
        return repr(error)


seen = {"llguidance": {}, "outlines-core": {}}
schemas = json.load(open("schemas.json"))
for name, schema in schemas.items():
    seen["llguidance"][name] = fails(lambda: LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema)))
    seen["outlines-core"][name] = fails(lambda: build_regex_from_schema(json.dumps(schema)) and "")
refused = {package: {name: why.split("\n")[0][:60] for name, why in found.items() if why} for package, found in seen.items()}
print({package: version(package) for package in seen}, "zod 4.6.7:", schemas["record"], schemas["starts"], "refused:", refused)
wrong = list(refused["llguidance"]) != ["record", "starts", "includes", "lowercase", "base64", "jwt", "e164", "duration", "hostname", "float32"]
wrong |= list(refused["outlines-core"]) != ["jwt"]
raise SystemExit(wrong or "propertyNames" not in seen["llguidance"]["record"] or schemas["starts"]["format"] != "starts_with")
PYTHON
