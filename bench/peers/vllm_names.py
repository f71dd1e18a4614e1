"""Writes the names of vLLM's interface from its source: ``tests/vllm_names.json``.

``pip download --no-deps vllm`` and ``python -m bench.peers.vllm_names vllm-*.whl``. Nothing of it
is imported. tests/test_absent.py says of each name whether it works here or what to do instead.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[2] / "tests" / "vllm_names.json"
_WHERE = re.compile(
    r"vllm/(entrypoints/.*|inputs/.*|engine/arg_utils|sampling_params|outputs|_version)\.py"
)

Classes = Mapping[str, ast.ClassDef]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="vllm-VERSION-....whl")
    wheel = parser.parse_args().wheel
    classes = dict(_classes(wheel))
    names = {
        "settings": [*_fields(classes, "EngineArgs"), *_parameters(classes, "LLM", "__init__")],
        "flags": [*_fields(classes, "AsyncEngineArgs"), *_fields(classes, "FrontendArgs")],
        "methods": _methods(classes, "LLM"),
        "generate": _parameters(classes, "LLM", "generate"),
        "chat": _parameters(classes, "LLM", "chat"),
        "sampling": _fields(classes, "SamplingParams"),
        "prompts": [*_fields(classes, "TextPrompt"), *_fields(classes, "TokensPrompt")],
        "outputs": [
            *_parameters(classes, "RequestOutput", "__init__"),
            *_fields(classes, "CompletionOutput"),
        ],
        "completions": _fields(classes, "CompletionRequest"),
        "chat_completions": _fields(classes, "ChatCompletionRequest"),
        "responses": _fields(classes, "ResponsesRequest"),
    }
    assert all(names.values()), [kind for kind, found in names.items() if not found]
    public = {
        kind: sorted({name for name in found if not name.startswith("_")})
        for kind, found in names.items()
    }
    document = {"vllm": wheel.name.split("-")[1], **public}
    OUTPUT.write_text(json.dumps(document, indent=1) + "\n")


def _classes(wheel: Path) -> Iterator[tuple[str, ast.ClassDef]]:
    with zipfile.ZipFile(wheel) as files:
        for path in files.namelist():
            if _WHERE.fullmatch(path):
                for node in ast.walk(ast.parse(files.read(path))):
                    if isinstance(node, ast.ClassDef):
                        yield node.name, node


def _bodies(classes: Classes, name: str) -> Iterator[ast.stmt]:
    """The statements of a class and of its bases."""
    found = classes.get(name)
    if found is None:
        return
    yield from found.body
    for base in found.bases:
        yield from _bodies(classes, ast.unparse(base).partition("[")[0].rpartition(".")[2])


def _fields(classes: Classes, name: str) -> list[str]:
    return [
        ast.unparse(node.target)
        for node in _bodies(classes, name)
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
    ]


def _methods(classes: Classes, name: str) -> list[str]:
    return [node.name for node in _bodies(classes, name) if isinstance(node, ast.FunctionDef)]


def _parameters(classes: Classes, name: str, method: str) -> list[str]:
    found = []
    for node in _bodies(classes, name):
        if isinstance(node, ast.FunctionDef) and node.name == method:
            given = node.args
            found += [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [each for each in found if each != "self"]


if __name__ == "__main__":
    main()
