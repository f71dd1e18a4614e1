#!/bin/sh
# sglang 0.5.23: its detectors of tool calls, for a whole answer (detect_and_parse) and for a stream of single characters (parse_streaming_increment, then finish)
# Guess: the same calls and the same content both ways; arguments are the model's text; a call of a function that is not among the tools is passed on as any other (as vLLM does)
# Seen: of mistral's list of two calls a stream gives the second as content; a call of an unknown function is dropped with its text, and in a stream its arguments are content; behind a call, content is dropped, of hermes in a stream kept; arguments are written anew: 1e2 is 100.0
# Only the package itself is installed, not the engine that it asks for; its __init__.py, which loads that, is passed over
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-deps sglang==0.5.23
"$work/venv/bin/pip" install -q pydantic==2.14.4 orjson==3.13.0 partial-json-parser==0.2.1.1.post7 openai==2.8.0 msgspec==0.23.0 pybase64==1.5.1 requests==2.34.2 tqdm==4.70.1 IPython==9.18.1 numpy==2.3.5 2>"$work/conflicts" || { cat "$work/conflicts"; exit 1; }
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import importlib.util
import sys
import types
from importlib.metadata import version

package = types.ModuleType("sglang")
package.__path__ = list(importlib.util.find_spec("sglang").submodule_search_locations)
sys.modules["sglang"] = package

from sglang.srt.entrypoints.openai.protocol import Function, Tool  # noqa: E402
from sglang.srt.function_call.hermes_detector import HermesDetector  # noqa: E402
from sglang.srt.function_call.mistral_detector import MistralDetector  # noqa: E402
from sglang.srt.function_call.qwen25_detector import Qwen25Detector  # noqa: E402

tools = [Tool(type="function", function=Function(name=name, parameters={"type": "object"})) for name in ("first", "second")]


def whole(detector, text):
    result = detector().detect_and_parse(text, tools)
    return result.normal_text, [(call.name, call.parameters) for call in result.calls]


def pieces(detector, text):
    parser, content, calls = detector(), "", {}
    results = [parser.parse_streaming_increment(character, tools) for character in text]
    for result in (*results, parser.finish(tools)):
        content += result.normal_text or ""
        for part in result.calls:
            named, arguments = calls.get(part.tool_index, ("", ""))
            calls[part.tool_index] = named + (part.name or ""), arguments + part.parameters
    return content, list(calls.values())


one = '{"name": "second", "arguments": {"x":1e2}}'
other = '{"name": "first", "arguments": {}}'
unknown = '{"name": "third", "arguments": {"x": 1}}'
texts = {
    "two calls": (MistralDetector, f"[TOOL_CALLS] [{one}, {other}]"),
    "unknown": (Qwen25Detector, f"<tool_call>\n{unknown}\n</tool_call>"),
    "behind": (Qwen25Detector, f"A<tool_call>\n{one}\n</tool_call>B"),
    "behind, hermes": (HermesDetector, f"A<tool_call>\n{one}\n</tool_call>B"),
}
seen = {name: (whole(*text), pieces(*text)) for name, text in texts.items()}
print("sglang", version("sglang"))
for name, (together, apart) in seen.items():
    print(name, "whole:", together, "in pieces:", apart)
call = "second", '{"x": 100.0}'
wanted = {
    "two calls": (("", [call, ("first", "{}")]), (", " + other, [call])),
    "unknown": (("", []), (', "arguments": {"x": 1}}\n', [])),
    "behind": (("A", [call]), ("A", [call])),
    "behind, hermes": (("A", [call]), ("A\nB", [call])),
}
raise SystemExit(seen != wanted)
PYTHON
