"""The dependency directions inside kvserve, read off every import statement.

``server -> benchmarks -> engine -> {scheduler, kernels} -> {config, log, ...}``: a file imports its
own package and what stands to the right of it. The rules that no order expresses (who may know
torch, triton, ray, ...) stand in the tables below.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from tests.import_graph import PACKAGE, ROOT, Import, imports_of, python_files

LINKS = ("engine", "kernels", "scheduler", "server")

# Packages by height; a module directly under kvserve/ is shared vocabulary, at the bottom.
SHARED, ENTRY = "shared", "entry"
HEIGHT = {
    SHARED: 0,
    "data": 0,
    "kernels": 1,
    "scheduler": 1,
    "engine": 2,
    "benchmarks": 3,
    "server": 4,
    ENTRY: 5,
}
# Names that `kvserve/__init__.py` loads from the engine on first use.
ENGINE_EXPORTS = {"LLM", "AsyncEngine"}

POLICY_IMPORTS = (
    "torch",
    "kvserve.scheduler.triggers.budget",
    "kvserve.scheduler.triggers.trigger",
    "kvserve.scheduler.triggers.code_trigger",
    "kvserve.scheduler.triggers.periodic",
    "kvserve.scheduler.triggers.rounds",
    "kvserve.scheduler.triggers.pruning",
    "kvserve.scheduler.layout",
)
# Below these paths nothing else may be imported, the standard library and the package itself aside.
ONLY = {
    "kvserve/scheduler/": ("numpy", "kvserve"),
    "kvserve/kernels/": ("torch", "triton"),
    "kvserve/kernels/cpu/": ("torch", "kvserve.kernels", "kvserve.folders"),
    "kvserve/kernels/attention/": ("torch", "triton", "kvserve.kernels"),
    "kvserve/kernels/events/": ("torch", "kvserve.kernels"),
    "kvserve/kernels/sampling/": ("torch", "triton", "kvserve.kernels"),
    "kvserve/kernels/scores/": ("torch", "triton", "kvserve.kernels"),
    "kvserve/engine/policies/": POLICY_IMPORTS,
    "kvserve/engine/policies/scoring.py": (*POLICY_IMPORTS, "kvserve.kernels"),
    "kvserve/engine/policies/selection.py": (*POLICY_IMPORTS, "kvserve.kernels"),
}

# Only these paths know these packages.
PROCESS_SEAM = tuple(
    f"kvserve/engine/{m}.py" for m in ("frontend/client", "core/core_process", "messages")
)
OWNERS = {
    "triton": ("kvserve/kernels/",),
    "flash_attn": ("kvserve/engine/attention/flash.py",),
    "flash_attn_interface": ("kvserve/engine/attention/flash.py",),
    "xformers": ("kvserve/engine/attention/xformers.py",),
    "ray": (
        "kvserve/server/replicas/replicated_engine.py",
        "kvserve/server/replicas/engine_replica.py",
    ),
    "msgspec": (*PROCESS_SEAM, "kvserve/server/http/json_body.py"),
    "zmq": PROCESS_SEAM,
}

# What the server needs and nothing below it may; its command line loads them when it serves.
SERVING = {"fastapi", "starlette", "uvicorn", "pydantic", "orjson"}
FORBIDDEN = {
    SHARED: SERVING | {"openai"},
    "engine": SERVING | {"openai"},
    "benchmarks": SERVING,
    ENTRY: SERVING,
}
# Installed by extras that anyone may use: never needed to import a module.
OPTIONAL = {"matplotlib", "openai", "opentelemetry"}


# ---- judging it ---------------------------------------------------------------------------------


def unit_of_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    if len(parts) > 2:
        return parts[1]
    return ENTRY if parts[1] == "__main__.py" else SHARED


def unit_of_name(name: str) -> str:
    child = name.split(".")[1] if "." in name else ""
    if child in ENGINE_EXPORTS:
        return "engine"
    return child if child in HEIGHT else SHARED


def allowed_below(path: str) -> tuple[str, ...] | None:
    """The ``ONLY`` entry of the longest matching path."""
    matches = [prefix for prefix in ONLY if path.startswith(prefix)]
    return ONLY[max(matches, key=len)] if matches else None


def faults(path: str, imported: Import) -> Iterator[str]:
    """What one import of the file ``path`` (from the root, with slashes) breaks."""
    name, top, unit = imported.name, imported.top, unit_of_path(path)
    own_package = ".".join(PurePosixPath(path).parent.parts)

    if top in LINKS:
        yield f"the link {top} at the root is for readers: import kvserve.{top}"
    if top == "kvserve" and path != "kvserve/__init__.py":
        target = unit_of_name(name)
        if target != unit and HEIGHT[target] >= HEIGHT[unit]:
            yield f"{unit} does not import {target}"
    if path == "kvserve/__init__.py" and not imported.deferred and unit_of_name(name) != SHARED:
        yield "kvserve/__init__.py loads its names on first use"

    only = allowed_below(path)
    known = top in sys.stdlib_module_names or imported.within(own_package)
    if only and not known and not any(imported.within(allowed) for allowed in only):
        yield f"files here import nothing but {', '.join(only)}"

    owners = OWNERS.get(top)
    if owners and not path.startswith(owners):
        yield f"only {', '.join(owners)} may know {top}"
    if top in FORBIDDEN.get(unit, ()):
        yield f"{unit} does not import {top}"
    if path == "kvserve/server/cli/commands.py" and top in SERVING and not imported.deferred:
        yield f"the command line imports {top} inside the commands that serve"
    if top in OPTIONAL and imported.when == "load":
        yield f"{top} comes with an extra: import it where it is used"


def violations(path: str, source: str) -> list[str]:
    if unit_of_path(path) not in HEIGHT:
        return [f"{path}: kvserve/{unit_of_path(path)} has no place in the dependency order"]
    return [
        f"{path}:{imported.line}: {imported.name}: {fault}"
        for imported in imports_of(path, source)
        for fault in faults(path, imported)
    ]


# ---- the repository keeps the rules -------------------------------------------------------------


def test_dependency_directions() -> None:
    files = python_files(PACKAGE)
    assert files
    found = [fault for path, source in files for fault in violations(path, source)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("folder", ["tests", "bench"])
def test_nothing_imports_through_the_links(folder: str) -> None:
    found = [
        f"{path}:{imported.line}: {imported.name}"
        for path, source in python_files(ROOT / folder)
        for imported in imports_of(path, source)
        if imported.top in LINKS
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.skipif(sys.platform == "win32", reason="links are plain files on some checkouts")
@pytest.mark.parametrize("name", LINKS)
def test_root_links_are_relative(name: str) -> None:
    assert os.readlink(ROOT / name) == f"kvserve/{name}"
    assert (ROOT / name).is_dir()


# ---- what a fresh interpreter loads -------------------------------------------------------------


def loaded_by(*modules: str, absent: Iterable[str] = ()) -> set[str]:
    """Top-level packages in memory after importing ``modules`` in a world without ``absent``."""
    script = """
        import importlib, sys
        modules, absent = (text.split() for text in sys.argv[1:])
        sys.modules.update(dict.fromkeys(absent))
        for module in modules:
            importlib.import_module(module)
        print(*{name.partition(".")[0] for name, loaded in sys.modules.items() if loaded})
    """
    command = [sys.executable, "-c", textwrap.dedent(script), " ".join(modules), " ".join(absent)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_scheduler_loads_no_torch() -> None:
    files = [path for path, _ in python_files(PACKAGE / "scheduler")]
    modules = [path.removesuffix(".py").replace("/", ".") for path in files]
    loaded = loaded_by("kvserve", *(m.removesuffix(".__init__") for m in modules))
    assert "kvserve" in loaded
    assert "torch" not in loaded


def test_command_line_loads_no_server() -> None:
    assert not loaded_by("kvserve.server.cli.commands") & SERVING


def test_engine_needs_neither_server_nor_extras() -> None:
    absent = {*SERVING, *OPTIONAL, *OWNERS}
    assert "torch" in loaded_by("kvserve.engine.frontend.llm", absent=absent)


# ---- what is installed --------------------------------------------------------------------------


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copytree(PACKAGE, tree / "kvserve", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in LINKS:
        (tree / name).symlink_to(f"kvserve/{name}")
    expected = {f.relative_to(tree).as_posix() for f in tree.glob("kvserve/**/*") if f.is_file()}

    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "..", "."]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=240)
    (wheel,) = tmp_path.glob("kvserve-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    meta = wheel.name.split("-py3")[0] + ".dist-info"
    assert {name.partition("/")[0] for name in names} == {"kvserve", meta}
    assert {name for name in names if name.startswith("kvserve/")} == expected
    assert any(name.startswith("kvserve/data/") for name in names)


# ---- the checker itself -------------------------------------------------------------------------

GOOD = [
    ("kvserve/scheduler/a.py", "import numpy as np\nfrom kvserve.log import get_logger"),
    ("kvserve/scheduler/a.py", "from . import layout\nfrom .trigger import Trigger"),
    ("kvserve/kernels/a.py", "import torch\nfrom kvserve.kernels import dispatch"),
    ("kvserve/kernels/a.py", "try:\n    import triton\nexcept ImportError:\n    triton = None"),
    ("kvserve/engine/a.py", "from kvserve.scheduler import scheduler\nimport kvserve.kernels"),
    ("kvserve/engine/a.py", "from ..config import EngineConfig\nfrom .policies import registry"),
    ("kvserve/engine/frontend/client.py", "import msgspec, zmq.asyncio"),
    ("kvserve/engine/policies/a.py", "import math, torch\nfrom .scoring import mass"),
    ("kvserve/engine/policies/a.py", "from kvserve.scheduler.triggers.trigger import AtPrefillEnd"),
    ("kvserve/engine/policies/scoring.py", "from kvserve.kernels.scores.window_scores import mass"),
    ("kvserve/engine/policies/selection.py", "from kvserve.kernels.scores.token_to_chunk import x"),
    ("kvserve/engine/attention/flash.py", "import flash_attn"),
    ("kvserve/benchmarks/a.py", "def plot():\n    import matplotlib.pyplot\n    import openai"),
    ("kvserve/benchmarks/a.py", "from kvserve import LLM, __version__"),
    ("kvserve/server/a.py", "import fastapi\nfrom kvserve.benchmarks import report"),
    ("kvserve/server/replicas/replicated_engine.py", "import ray"),
    ("kvserve/server/cli/commands.py", "def serve():\n    import uvicorn"),
    ("kvserve/__init__.py", "if TYPE_CHECKING:\n    from kvserve.engine.frontend.llm import LLM"),
    ("kvserve/__main__.py", "from kvserve.server.cli.commands import main"),
    ("kvserve/config.py", "import dataclasses\nfrom kvserve.log import ConfigError"),
]
BAD = [
    ("kvserve/scheduler/a.py", "import torch"),
    ("kvserve/scheduler/a.py", "if TYPE_CHECKING:\n    import torch"),
    ("kvserve/scheduler/a.py", "def f():\n    from torch import Tensor"),
    ("kvserve/scheduler/a.py", "import importlib\nimportlib.import_module('torch')"),
    ("kvserve/scheduler/a.py", "from kvserve.engine import sampler"),
    ("kvserve/scheduler/a.py", "from ..kernels import dispatch"),
    ("kvserve/scheduler/a.py", "from kvserve import LLM"),
    ("kvserve/kernels/a.py", "from kvserve.config import EngineConfig"),
    ("kvserve/kernels/a.py", "from kvserve.scheduler.layout import KVLayout"),
    ("kvserve/kernels/a.py", "from .. import log"),
    ("kvserve/engine/a.py", "import triton"),
    ("kvserve/engine/a.py", "try:\n    import xformers\nexcept ImportError:\n    pass"),
    ("kvserve/engine/a.py", "def f():\n    import flash_attn"),
    ("kvserve/engine/a.py", "__import__('ray')"),
    ("kvserve/engine/a.py", "import zmq"),
    ("kvserve/engine/a.py", "async def f():\n    import pydantic"),
    ("kvserve/engine/a.py", "class A:\n    from kvserve.server import app"),
    ("kvserve/engine/a.py", "from kvserve.benchmarks import report"),
    ("kvserve/engine/attention/a.py", "from engine import sampler"),
    ("kvserve/engine/policies/a.py", "import numpy"),
    ("kvserve/engine/policies/a.py", "from kvserve.config import EngineConfig"),
    ("kvserve/engine/policies/a.py", "from kvserve.scheduler import KVLayout"),
    ("kvserve/engine/policies/a.py", "from kvserve.kernels import window_scores"),
    ("kvserve/engine/policies/scoring.py", "from kvserve.engine import compressor"),
    ("kvserve/benchmarks/a.py", "from kvserve.server import metrics"),
    ("kvserve/benchmarks/a.py", "import orjson"),
    ("kvserve/benchmarks/a.py", "import matplotlib.pyplot as plt"),
    ("kvserve/server/a.py", "import ray.serve"),
    ("kvserve/server/a.py", "import msgspec"),
    ("kvserve/server/cli/commands.py", "import uvicorn"),
    (
        "kvserve/server/cli/commands.py",
        "try:\n    from fastapi import FastAPI\nexcept ImportError: ...",
    ),
    ("kvserve/__init__.py", "from kvserve.engine.frontend.llm import LLM"),
    ("kvserve/config.py", "from kvserve.scheduler.layout import Granularity"),
    ("kvserve/config.py", "from pydantic import BaseModel"),
    ("kvserve/helpers/a.py", ""),
]


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_checker_accepts(path: str, source: str) -> None:
    assert violations(path, source) == []


@pytest.mark.parametrize(("path", "source"), BAD)
def test_checker_refuses(path: str, source: str) -> None:
    assert violations(path, source)


def test_checker_names_the_place() -> None:
    (fault,) = violations("kvserve/scheduler/a.py", "import os\n\nimport torch\n")
    assert fault.startswith("kvserve/scheduler/a.py:3: torch: ")
