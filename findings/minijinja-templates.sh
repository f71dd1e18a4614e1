#!/bin/sh
# minijinja 3.1.0 beside jinja2 3.1.6: what a chat template writes
# Guess: the same text: minijinja's Python package has Python's methods and writes True and None as jinja2 does
# Seen: a float is never written with an exponent (1e-07 is 0.0000001, 1e+16 seventeen digits) but by tojson, where 1e-07 is 1e-7, and inf and nan are null; a string and a mapping are no `sequence`, which they are in jinja2; `'%s' % x` and removeprefix are errors; tojson keeps the order of the keys and non-ASCII, as transformers' does, and escapes <, > and ' as jinja2's does
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q minijinja==3.1.0 jinja2==3.1.6
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import jinja2
import minijinja


def both(text, **values):
    found = []
    for render in (minijinja.Environment().render_str, lambda text, **values: jinja2.Template(text).render(**values)):
        try:
            found.append(render(text, **values))
        except minijinja.TemplateError:
            found.append("error")
    return tuple(found)


seen = {
    "numbers": both("{{ a }} {{ b }} {{ c }}", a=1e-7, b=1e16, c=1.0),
    "in JSON": both("{{ a | tojson }} {{ b | tojson }} {{ c | tojson }}", a=1e-7, b=1e16, c=float("inf")),
    "sequences": both("{{ s is sequence }} {{ m is sequence }} {{ l is sequence }}", s="s", m={}, l=[]),
    "format": both("{{ '%s!' % 'a' }}"),
    "method": both("{{ 'xa'.removeprefix('x') }}"),
    "keys": both("{{ m | tojson }}", m={"b": "\u00e9<", "a": 1}),
    "same": both("{{ true }} {{ none }} {{ ['a', 1.0] }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 'a'.upper() }}"),
}
print("minijinja", version("minijinja"), "jinja2", version("jinja2"), seen)
wanted = {
    "numbers": ("0.0000001 10000000000000000.0 1.0", "1e-07 1e+16 1.0"), "in JSON": ("1e-7 1e+16 null", "1e-07 1e+16 Infinity"),
    "sequences": ("False False True", "True True True"), "format": ("error", "a!"), "method": ("error", "a"),
    "keys": ('{"b": "\u00e9\\u003c", "a": 1}', '{"a": 1, "b": "\\u00e9\\u003c"}'), "same": ("True None ['a', 1.0] -4 2 A",) * 2,
}
raise SystemExit(seen != wanted)
PYTHON
