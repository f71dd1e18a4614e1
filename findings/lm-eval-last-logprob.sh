#!/bin/sh
# lm-eval 0.4.13: log-likelihoods from a server's completions with echo
# Guess: it sums the logprobs of the tokens it sent, behind the context, whatever the server adds to them
# Seen: it drops the last entry of the list, which it takes for the one token it asked for: of a server that makes none, or lists none for an end token, the last token of the continuation is not counted (-2 instead of -6), and nothing says so. A token counts as greedy if its logprob is the largest of its top_logprobs by name: of two alike, the first. lm_eval/models/openai_completions.py, parse_logprobs
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q lm-eval==0.4.13
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from lm_eval.models.openai_completions import LocalCompletionsAPI


def score(tokens, logprobs):
    top = [None if number is None else {token: number} for token, number in zip(tokens, logprobs)]
    columns = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top}
    return LocalCompletionsAPI.parse_logprobs({"choices": [{"index": 0, "logprobs": columns}]}, tokens=[[1, 2, 3, 4]], ctxlens=[2])


sent, numbers = ["a", "b", "c", "d"], [None, -1.0, -2.0, -4.0]
seen = {count: score(sent + ["x", "y"][:count], numbers + [-8.0, -16.0][:count]) for count in (1, 0, 2)}
print("lm-eval", version("lm-eval"), "c and d behind a and b, -2 and -4; with so many tokens made:", seen)
raise SystemExit(seen != {1: [(-6.0, True)], 0: [(-2.0, True)], 2: [(-14.0, True)]})
PYTHON
