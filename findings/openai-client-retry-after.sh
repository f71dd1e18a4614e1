#!/bin/sh
# openai 3.52.0 (Python): a 429 with Retry-After, and what the client does of its two retries
# Guess: it waits as long as it is told, or no longer than some maximum, and tries again
# Seen: up to 120 s it waits exactly so long; beyond that it does not try again at all, and the error comes at once. Without the header it waits a second or less
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q openai==3.52.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import sys
import time
from importlib.metadata import version

import openai

try:
    import httpx2 as httpx
except ImportError:
    import httpx

waited, calls = [], []
time.sleep = waited.append


def attempts(after):
    waited.clear()
    calls.clear()

    def reply(request):
        calls.append(request)
        return httpx.Response(429, json={"error": {"message": "full"}}, headers={"Retry-After": after} if after else {})

    client = openai.OpenAI(api_key="none", http_client=httpx.Client(transport=httpx.MockTransport(reply)))
    try:
        client.models.list()
    except openai.RateLimitError:
        return len(calls), [round(x, 1) for x in waited]


seen = {after: attempts(after) for after in ("7", "120", "121", "")}
print(version("openai"), "Retry-After -> calls, waits:", seen)
wanted = [(3, [7.0, 7.0]), (3, [120.0, 120.0]), (1, [])]
sys.exit(list(seen.values())[:3] != wanted or seen[""][0] != 3 or max(seen[""][1]) > 2)
PYTHON
