"""Imports as they stand in the source, and what they make of modules and rooms.

`python -m tests.import_graph` prints the counts: files per folder, arrows between rooms, circles.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvserve"


@dataclass(frozen=True)
class Import:
    """One imported name; ``when``: load, guarded (``except ImportError``), typing or call."""

    name: str
    line: int
    when: str

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def deferred(self) -> bool:
        return self.when in ("call", "typing")

    def within(self, prefix: str) -> bool:
        return self.name == prefix or self.name.startswith(prefix + ".")


class ImportReader(ast.NodeVisitor):
    """Collects the imports of a module of ``package``, relative and literal dynamic ones too."""

    def __init__(self, package: str) -> None:
        self.package = package.split(".")
        self.when = "load"
        self.found: list[Import] = []

    def add(self, name: str, line: int) -> None:
        self.found.append(Import(name, line, self.when))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = [node.module] if node.module else []
        if node.level:
            base = self.package[: len(self.package) - node.level + 1] + base
        for alias in node.names:
            self.add(".".join(base if alias.name == "*" else [*base, alias.name]), node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
        called = called.id if isinstance(called, ast.Name) else called
        if called in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self.add(name.value, node.lineno)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.AST) -> None:
        with self.during("call"):
            self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        typing = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        with self.during("typing" if typing else self.when):
            self.visit_each(node.body)
        self.visit_each(node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        caught = " ".join(ast.unparse(h.type) for h in node.handlers if h.type)
        guarded = "ImportError" in caught or "ModuleNotFoundError" in caught
        with self.during("guarded" if guarded else self.when):
            self.visit_each(node.body)
        self.visit_each([*node.handlers, *node.orelse, *node.finalbody])

    def visit_each(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    @contextmanager
    def during(self, when: str) -> Iterator[None]:
        before = self.when
        if before not in ("call", "typing"):
            self.when = when
        yield
        self.when = before


def imports_of(path: str, source: str) -> list[Import]:
    reader = ImportReader(".".join(PurePosixPath(path).parent.parts))
    reader.visit(ast.parse(source, path))
    return reader.found


def python_files(folder: Path) -> list[tuple[str, str]]:
    files = sorted(folder.rglob("*.py"))
    return [(f.relative_to(ROOT).as_posix(), f.read_text(encoding="utf-8")) for f in files]


# ---- modules and rooms --------------------------------------------------------------------------


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of(module: str, packages: Iterable[str]) -> str:
    """``kvserve.engine.core.threads``: ``engine.core``; what stands above all rooms: ``""``."""
    name = module if module in packages else module.rpartition(".")[0]
    return name.partition(".")[2]


def module_arrows(files: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Who imports whom among these modules, at load or later. A package's own names, which it
    loads on first use (``kvserve/__init__.py``), are nobody's arrows."""
    sources = {module_of(path): (path, source) for path, source in files}
    arrows: dict[str, set[str]] = {}
    for module, (path, source) in sources.items():
        if module in ("kvserve", "kvserve.__main__"):
            continue
        found = {_nearest(i.name, sources) for i in imports_of(path, source)}
        arrows[module] = found - {module, "", "kvserve"}
    return arrows


def _nearest(name: str, modules: Mapping[str, object]) -> str:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def room_arrows(arrows: Mapping[str, Iterable[str]], packages: set[str]) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, targets in arrows.items():
        room = room_of(module, packages)
        rooms[room] |= {room_of(target, packages) for target in targets} - {room}
    return dict(rooms)


def circles(arrows: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Sets of nodes that reach each other."""
    reach = {node: _reached(node, arrows) for node in arrows}
    found = []
    for node in sorted(reach):
        circle = {other for other in reach[node] if node in reach.get(other, ())}
        if node in circle and circle not in found:
            found.append(circle)
    return found


def _reached(node: str, arrows: Mapping[str, Iterable[str]]) -> set[str]:
    seen: set[str] = set()
    stack = list(arrows[node])
    while stack:
        if (other := stack.pop()) not in seen:
            seen.add(other)
            stack += arrows.get(other, ())
    return seen


def files_per_folder(files: Iterable[tuple[str, str]]) -> Counter[str]:
    return Counter(PurePosixPath(path).parent.as_posix() for path, _ in files)


def package_names(files: Iterable[tuple[str, str]]) -> set[str]:
    return {module_of(path) for path, _ in files if path.endswith("/__init__.py")}


def main() -> None:
    files = python_files(PACKAGE)
    arrows, packages = module_arrows(files), package_names(files)
    for folder, count in files_per_folder(files).most_common():
        print(f"{count:4} files in {folder}")
    rooms = room_arrows(arrows, packages)
    print(f"{sum(map(len, arrows.values()))} arrows between {len(arrows)} modules")
    print(f"{sum(map(len, rooms.values()))} arrows between {len(rooms)} rooms")
    print(f"circles of modules: {[sorted(c) for c in circles(arrows)]}")
    print(f"circles of rooms: {[sorted(c) for c in circles(rooms)]}")
    for room in sorted(rooms):
        print(f"{room or 'kvserve'} -> {', '.join(sorted(r or 'kvserve' for r in rooms[room]))}")


if __name__ == "__main__":
    main()
