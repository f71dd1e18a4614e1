#!/bin/sh
# @huggingface/jinja 0.5.11 (chat templates of transformers.js) beside jinja2 3.1.6
# Guess: a template that jinja2 takes is the same prompt in both, but for what JavaScript cannot say (1.0 is 1 there)
# Seen: two lists or mappings are equal only if they are one object, and '1' == 1 is true; a name that is a whole number comes first in a mapping; -7 % 3 is -1, not 2; strip('x') takes no letters and cuts white space instead; capitalize leaves the other letters as they are; an emoji counts as two, and half of it can be cut off; values are written true and nothing instead of True and None. Most of it raises nothing, so a template branches otherwise
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jinja2==3.1.6
cd "$work"
npm install --silent --no-audit --no-fund @huggingface/jinja@0.5.11 >/dev/null
cat > templates.json <<'JSON'
["{{ [] == [] }}", "{{ {'a': 1} == {'a': 1} }}", "{{ '1' == 1 }}", "{% for name in arguments %}{{ name }};{% endfor %}", "{{ -7 % 3 }}",
 "{{ 'xax'.strip('x') }}", "{{ 'hELLO' | capitalize }}", "{{ '😀a' | length }}", "{{ none }}", "{{ [1, none, 'a'] }}", "{{ 'a,b'.split(',')[-1] }}", "{{ -7 // 2 }}"]
JSON
cat > render.mjs <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import { Template } from "@huggingface/jinja";

const context = { arguments: JSON.parse('{"b": 1, "10": 2, "2": 3}') };
const made = JSON.parse(readFileSync("templates.json", "utf8")).map((text) => new Template(text).render(context));
console.log(JSON.stringify(made));
JAVASCRIPT
node render.mjs > made.json
"$work/venv/bin/python" - <<'PYTHON'
import json

import jinja2

templates, made = json.load(open("templates.json")), json.load(open("made.json"))
context = {"arguments": {"b": 1, "10": 2, "2": 3}}
seen = {text: (jinja2.Template(text).render(context), other) for text, other in zip(templates, made)}
print("jinja2", jinja2.__version__, "beside @huggingface/jinja 0.5.11:", seen)
wanted = [
    ("True", "false"), ("True", "false"), ("False", "true"), ("b;10;2;", "2;10;b;"), ("2", "-1"), ("a", "xax"), ("Hello", "HELLO"),
    ("2", "3"), ("None", ""), ("[1, None, 'a']", '[1, null, "a"]'), ("b", "b"), ("-4", "-4"),
]
raise SystemExit(list(seen.values()) != wanted)
PYTHON
