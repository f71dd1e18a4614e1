"""An MCP server with one tool, over standard input and output: it needs no package."""

from __future__ import annotations

import json
import sys
from typing import Any

TITLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TOOL = {
    "name": "read_note",
    "description": "Reads a note.",
    "inputSchema": {"type": "object", "properties": {"title": TITLE}},
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    asked = request.get("params", {})
    if request["method"] == "initialize":
        about = {"name": "notes", "version": "1"}
        version = asked["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if request["method"] == "tools/list":
        return {"tools": [TOOL]}
    if request["method"] == "tools/call":
        text = f"The note {asked['arguments']['title']!r} is empty."
        return {"content": [{"type": "text", "text": text}]}
    return {}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = {"jsonrpc": "2.0", "id": request["id"], "result": answer(request)}
        print(json.dumps(result), flush=True)
