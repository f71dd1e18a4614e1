"""``reference/python.md``: public names with their signatures, docstrings and fields."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import is_dataclass
from typing import Any

import kvserve
from docs.generate.markdown import prose, table
from kvserve import outputs

_INTRO = """\
# Python

`from kvserve import LLM, SamplingParams`: the names below are public; whatever else can be
imported may change. Settings of `LLM(model, **settings)` and fields of `EngineConfig` are the
flags of [`kvserve serve`](cli.md#kvserve-serve) that concern the engine, with underscores:
`--max-num-seqs 8` is `max_num_seqs=8`. Those of the server alone (`--host`, `--chat-template`) are
none. A wrong setting is a `ConfigError`, a wrong request a `RequestError`; both are `ValueError`s
and name the field (`RequestError.param`). `EngineDeadError` ends the requests of an `AsyncEngine`
whose engine has stopped. `AsyncLLM` and `AsyncLLMEngine` are vLLM's names of `AsyncEngine`,
`AsyncEngineArgs(model, **settings)` makes an `EngineConfig`.
"""
_IN_INTRO = {"__version__", "EngineConfig", "ConfigError", "RequestError", "EngineDeadError"}
_VLLMS_NAMES = {"AsyncLLM", "AsyncLLMEngine", "AsyncEngineArgs"}
_WIDTH = 80
_NO_FIELD = "init=False|ClassVar"
_PARTS_OF_OUTPUTS = ("KVCacheDetails", "KVTraceEvent", "Compaction", "Logprob", "RequestMetrics")


def page() -> str:
    """The page: a section for each public name, then for each type that their fields have."""
    names = sorted(set(kvserve.__all__) - _IN_INTRO - _VLLMS_NAMES, key=str.lower)
    parts = [_INTRO]
    parts += [_section(name, getattr(kvserve, name)) for name in names]
    parts += [_section(name, getattr(outputs, name)) for name in _PARTS_OF_OUTPUTS]
    return "\n".join(parts)


def _section(name: str, kind: type) -> str:
    parts = [f"## {name}\n", prose(kind.__doc__) + "\n"]
    if is_dataclass(kind):
        parts.append(table(["field", "type", "default", "meaning"], _fields(kind)))
    else:
        parts.append(f"```python\n{name}{_signature(kind.__init__, name)}\n```\n")  # type: ignore[misc]
    for method, value in vars(kind).items():
        if not method.startswith("_"):
            parts += _method(name, method, value)
    return "\n".join(parts)


def _method(name: str, method: str, value: Any) -> list[str]:
    if isinstance(value, property) and value.__doc__:
        return [f"**`{name}.{method}`** {prose(value.__doc__)}\n"]
    value = getattr(value, "__func__", value)  # of a class method
    if inspect.isfunction(value) and value.__doc__:
        word = "async " if inspect.iscoroutinefunction(value) else ""
        head = f"```python\n{word}{name}.{method}{_signature(value, method)}\n```\n"
        return [head, prose(value.__doc__) + "\n"]
    return []


def _signature(function: Any, name: str) -> str:
    """The signature without ``self``; a long one has one parameter per line."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    result = signature.replace(parameters=parameters)
    if name[:1].isupper():
        result = result.replace(return_annotation=inspect.Signature.empty)
    text = str(result).replace("'", "")
    if len(text) < _WIDTH:
        return text
    arguments, _, returned = text[1:].rpartition(")")
    lines = "".join(f"    {argument.strip()},\n" for argument in _split(arguments))
    return f"(\n{lines}){returned}"


def _split(arguments: str) -> list[str]:
    """Split at the commas outside of brackets."""
    depth, parts = 0, [""]
    for char in arguments:
        depth += (char in "[({") - (char in "])}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _fields(kind: type) -> list[list[str]]:
    """Name, type, default and docstring of each field that a user may give or read."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = []
    for at, node in enumerate(body.body):
        if not isinstance(node, ast.AnnAssign) or re.search(_NO_FIELD, ast.unparse(node)):
            continue
        default = "" if node.value is None else f"`{_default(node.value)}`"
        about = body.body[at + 1] if at + 1 < len(body.body) else None
        meaning = ""
        if isinstance(about, ast.Expr) and isinstance(about.value, ast.Constant):
            meaning = prose(str(about.value.value))
        kinds = ast.unparse(node.annotation)
        rows.append([f"`{ast.unparse(node.target)}`", f"`{kinds}`", default, meaning])
    return rows


def _default(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text.partition("default_factory=")[2].rstrip(")") + "()" if "field(" in text else text
