#!/bin/sh
# inspect-ai 0.3.285: the match, exact and includes scorers with numbers
# Guess: match() takes the target as a word of its own at the end: 42 is not in 142, and -5 is not 5
# Seen: it asks whether the text ends so: 142 is right for 42, -5 for 5 and 1/2 for 2; marks are taken off both first, so 5 is right for -5, by exact() as well. match(numeric=True) refuses all four, takes 1,042 for 1042 and 42.0 for 42, but also "42 apples", where the target is not at the end, and refuses 42%
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q inspect-ai==0.3.285
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import asyncio
from importlib.metadata import version

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, exact, match
from inspect_ai.solver import TaskState


def scored(scorer, text, target):
    state = TaskState(model="m", sample_id=1, epoch=1, input="q", messages=[], output=ModelOutput.from_content("m", text))
    return asyncio.run(scorer(state, Target([target]))).value


pairs = (("142", "42"), ("-5", "5"), ("5", "-5"), ("1/2", "2"), ("1,042", "1042"), ("42.0", "42"), ("42 apples", "42"), ("42%", "42"))
seen = {pair: "".join(scored(scorer, *pair) for scorer in (match(), match(numeric=True), exact())) for pair in pairs}
print("inspect-ai", version("inspect-ai"), "(answer, target), by match, match(numeric=True) and exact:", seen)
raise SystemExit(list(seen.values()) != ["CII", "CIC", "CIC", "CII", "ICC", "ICC", "ICI", "CIC"])
PYTHON
