#!/bin/sh
# httpx 0.28.1, httpx2 2.16.2, httpx-sse 0.4.3: lines of server-sent events whose JSON has U+2028 or U+0085 as it is, as orjson and json.dumps(ensure_ascii=False) write them
# Guess: a line of a stream ends where the format says: at CR LF, LF or CR (WHATWG HTML, "Parsing an event stream")
# Seen: iter_lines cuts as str.splitlines does, also at U+2028, U+2029, U+0085, U+001C and four others, so json.loads gets half an object; httpx-sse 0.4.3 cuts by the format. The rule: httpx/_decoders.py, LineDecoder
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q httpx==0.28.1 httpx2==2.16.2 httpx-sse==0.4.3
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json

import httpx
import httpx2
import httpx_sse

text = "a\u2028b\u0085c"
body = f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\n".encode()
kind = {"content-type": "text/event-stream"}
seen = {}
for client in (httpx, httpx2):
    lines = list(client.Response(200, headers=kind, stream=client.ByteStream(body)).iter_lines())
    seen[client.__name__] = lines
    print(client.__name__, client.__version__, "iter_lines of one event:", lines)
events = list(httpx_sse.EventSource(httpx.Response(200, headers=kind, stream=httpx.ByteStream(body))).iter_sse())
whole = [json.loads(event.data)["text"] for event in events]
print("httpx-sse", whole, "| bytes cut at LF:", body.split(b"\n"))
cut = ['data: {"text": "a', "b", 'c"}', ""]
raise SystemExit(seen != {"httpx": cut, "httpx2": cut} or whole != [text])
PYTHON
