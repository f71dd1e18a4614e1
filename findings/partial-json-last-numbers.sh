#!/bin/sh
# jiter 0.19.0 (which openai's client and pydantic read streams with) and partial-json-parser 0.2.1.1.post7 (vLLM, SGLang): JSON that is not complete
# Guess: a number at the very end is left out, as half of a word is: behind {"seconds": 12 may come 3, or a point
# Seen: it is given as it stands: 12, where the whole says 1234.5; jiter leaves out true, null and 1. while they are not complete, but not 12. partial-json-parser guesses on: "tr" is True, "N" is NaN, "1." is the int 1 and "1.5e" 1.5. So an argument of a tool call may be read before it is there, and no error says so
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jiter==0.19.0 partial-json-parser==0.2.1.1.post7
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import jiter
import partial_json_parser

whole = '{"seconds": 1234.5}'
seen = {}
for name, read in (("jiter", lambda text: jiter.from_json(text.encode(), partial_mode=True)), ("partial-json-parser", partial_json_parser.loads)):
    growing = [read(whole[:end]).get("seconds") for end in range(13, len(whole) + 1)]
    words = [read(f'{{"a": {end}').get("a", "none") for end in ("tr", "nu", "N", "1.", "1.5e", "-")]
    seen[name] = repr(growing), repr(words)
    print(name, version(name), whole, "as it grows:", growing, "| tr, nu, N, 1., 1.5e, -:", words)
wanted = {
    "jiter": ("[1, 12, 123, 1234, None, 1234.5, 1234.5]", "['none', 'none', 'none', 'none', 'none', 'none']"),
    "partial-json-parser": ("[1, 12, 123, 1234, 1234, 1234.5, 1234.5]", "[True, None, nan, 1, 1.5, 'none']"),
}
raise SystemExit(seen != wanted)
PYTHON
