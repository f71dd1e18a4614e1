"""What a fresh interpreter loads, what is installed, and that tests start where pytest is alone.

Who may import whom: pyproject.toml.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest

from kvserve import __version__
from tests.waiting import WAIT

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvserve"
LINKS = ("engine", "kernels", "scheduler", "server")
SERVING = {"fastapi", "starlette", "uvicorn", "pydantic", "orjson"}
"""What the server needs; the command line loads them when it serves."""
OPTIONAL = {"matplotlib", "openai", "opentelemetry"}
"""Installed by extras that anyone may use: never needed to import a module."""
OWNED = {"triton", "flash_attn", "flash_attn_interface", "xformers", "ray", "msgspec", "zmq"}
"""Known to one place each, which is not always loaded."""


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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_scheduler_loads_no_torch() -> None:
    files = [f.relative_to(ROOT).with_suffix("") for f in (PACKAGE / "scheduler").rglob("*.py")]
    loaded = loaded_by("kvserve", *(".".join(f.parts).removesuffix(".__init__") for f in files))
    assert "kvserve" in loaded
    assert "torch" not in loaded


def test_command_line_loads_no_server() -> None:
    assert not loaded_by("kvserve.server.cli.commands") & SERVING


def test_engine_needs_neither_server_nor_extras() -> None:
    absent = {*SERVING, *OPTIONAL, *OWNED}
    assert "torch" in loaded_by("kvserve.engine.frontend.llm", absent=absent)


def test_what_takes_as_long_as_torch_is_not_loaded_at_a_start() -> None:
    """The server's process starts the engine's before it loads torch; a model of our own needs no
    transformers, and recorded steps no compiler of torch."""
    script = """
        import sys
        import kvserve.engine.frontend.async_engine, kvserve.server.cli.runner
        assert "torch" not in sys.modules
        from kvserve.engine.core.engine_core import EngineCore
        EngineCore(kvserve.EngineConfig.from_flat(model="kvserve/tiny", num_gpu_blocks_override=64))
        print({"transformers", "torch._dynamo"} & sys.modules.keys())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
    assert done.stdout == "set()\n", done.stderr


def test_the_tokenizer_of_a_model_that_ships_loads_no_torch() -> None:
    """It is the one that transformers would find, which takes as long as the rest of the start."""
    script = """
        import sys
        from kvserve.engine.frontend.tokenizer import Tokenizer
        from kvserve.engine.models.hub import SHIPPED_MODELS
        known = {str(path): Tokenizer(str(path)).hf for path in SHIPPED_MODELS.values()}
        assert "torch" not in sys.modules
        from transformers import AutoTokenizer
        for path, own in known.items():
            found = AutoTokenizer.from_pretrained(path)
            assert type(found) is type(own) and found.init_kwargs == own.init_kwargs, path
            assert found.special_tokens_map == own.special_tokens_map
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr


# ---- what is installed --------------------------------------------------------------------------


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("kvserve", "bench"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in LINKS:
        (tree / name).symlink_to(f"kvserve/{name}")
    packages = [*tree.glob("kvserve/**/*"), *tree.glob("bench/harness/**/*")]
    expected = {file.relative_to(tree).as_posix() for file in packages if file.is_file()}

    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "..", "."]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=WAIT)
    (wheel,) = tmp_path.glob("kvserve-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    meta = wheel.name.split("-py3")[0] + ".dist-info"
    assert {name for name in names if not name.startswith(meta)} == expected
    assert any(name.startswith("kvserve/data/") for name in names)


def test_a_script_beside_the_clone_finds_the_editable_package(tmp_path: Path) -> None:
    """The folder that holds the clone is first on the script's path, and the clone's name there is
    the package's."""
    clone, site = tmp_path / "kvserve", tmp_path / "site"
    (clone / "kvserve").mkdir(parents=True)
    shutil.copy(PACKAGE / "__init__.py", clone / "kvserve")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)

    build = "from setuptools import build_meta; build_meta.build_editable('..')"
    run([sys.executable, "-c", build], clone)
    (wheel,) = tmp_path.glob("kvserve-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    script = "import site; site.addsitedir('site'); from kvserve import __version__ as v; print(v)"
    assert run([sys.executable, "-S", "-E", "-c", script], tmp_path) == f"{__version__}\n"


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_pytest_alone_is_enough() -> None:
    """``--strict-config`` refuses settings of plugins that are not there."""
    without = [f"-pno:{name}" for name in ("asyncio", "timeout", "xdist", "cacheprovider")]
    target = "tests/kernels/test_pooling.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *without, "--collect-only", "-q", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == 0, done.stderr
    assert "test_pooling" in done.stdout


# ---- what is declared ---------------------------------------------------------------------------

NAMES = {"flash_attn_interface": "flash_attn", "yaml": "pyyaml", "zmq": "pyzmq"}
"""Modules -> the packages that have them, where these are called otherwise."""


def test_every_package_that_is_imported_is_declared() -> None:
    """Starlette came with FastAPI, in whatever version that took."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {re.split(r"[^\w-]", each)[0].replace("-", "_").lower() for each in stated}
    declared |= {"opentelemetry", "setuptools"}
    imported, private = set(), set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported |= {name.partition(".")[0] for name in names}
            private |= {name for name in names if "._" in name and not name.startswith("torch.")}
    foreign = imported - set(sys.stdlib_module_names) - {"kvserve"}
    assert {NAMES.get(name, name) for name in foreign} <= declared
    assert not private
    [jinja] = (each for each in stated if each.startswith("jinja2"))
    assert jinja == "jinja2>=3.1.6"
