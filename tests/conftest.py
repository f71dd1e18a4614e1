"""One thread per test process, no hub, and small checkpoints to run on."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import socket
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Kernels then run in Triton's interpreter, if Triton finds this when transformers imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kvserve.engine.cache import entry_statistics
from kvserve.entry_format import FORMATS
from tests.checkpoints import write_checkpoint

torch.set_num_threads(1)
for name in [name for name in os.environ if name.startswith("KVSERVE_")]:
    del os.environ[name]  # settings of whoever runs the tests, which servers would read


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Settings of plugins that are not there, as on a machine that is lent for its GPU: they would
    be refused as unknown (``--strict-config``), and nothing that runs there needs them."""
    settings = {
        "asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"),
        "timeout": ("timeout", "timeout_func_only"),
    }
    for plugin, names in settings.items():
        if not pluginmanager.hasplugin(plugin):
            for name in names:
                parser.addini(name, f"of pytest-{plugin}, which is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    if shutil.which("g++") is None:
        missing["compiler"] = pytest.mark.skip(reason="needs g++")
    for item in items:
        for name, skip in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What is imported and collected is no garbage: collections need not look at it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def some_text() -> Iterator[None]:
    """Entries in few bits are shaped for models without a tokenizer, too, by a random text; and
    nothing of that is kept."""
    ids = np.random.default_rng(0).integers(5, 60, 200).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_statistics, "_text_ids", lambda *_: (ids, None))
        patch.setattr(entry_statistics, "cache_folder", lambda: None)
        yield


@pytest.fixture(scope="module")
def few_newest() -> Iterator[None]:
    """Of forms in few bits, the newest 32 tokens are held as they were computed, not more than what
    most tests compute."""
    with pytest.MonkeyPatch.context() as patch:
        for name, form in FORMATS.items():
            patch.setitem(FORMATS, name, replace(form, newest=min(form.newest, 32)))
        # They are a multiple of blocks, which others may make smaller.
        patch.setattr("kvserve.engine.cache.log_form.LARGEST", 16)
        yield


@pytest.fixture(scope="module", autouse=True)
def engines_end_with_their_module() -> Iterator[None]:
    """Ranks and helpers of its engines would live on, and their pools stay in memory."""
    llm = sys.modules.get("kvserve.engine.frontend.llm")
    if llm is None:
        yield
        return
    made, begin = list[weakref.ref[Any]](), llm.LLM.__init__

    @wraps(begin)
    def remember(self: Any, *args: Any, **settings: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.LLM, "__init__", remember)
        yield
    left = [each for each in (ref() for ref in made) if each is not None]
    for each in left:
        if hasattr(each, "engine"):  # it has started
            each.close()
    if made:
        left.clear()
        gc.collect()


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama checkpoint: 3 layers, 8 query and 2 KV heads of 16, 128 words."""
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 checkpoint: q/k norm, head_dim apart from hidden / heads."""
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL at which nobody listens: its port is taken, and refuses."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


@pytest.fixture(autouse=True)
def random_numbers_are_the_same_each_time() -> None:
    """Whichever tests came before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def the_log_is_as_libraries_have_it() -> Iterator[None]:
    """A program that a test runs in its own process sends the package's log to stderr from then on,
    and pytest would hear later messages twice."""
    yield
    for name in ("kvserve", "uvicorn.error", "uvicorn.access"):  # which share their handlers
        log = logging.getLogger(name)
        log.handlers, log.filters, log.propagate = [], [], True
        log.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def steps_that_raise(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test's own code finds wrong inside of a step fails the test: an engine goes on without
    the requests of a step that failed, whatever was found there."""
    if "engine" not in request.path.relative_to(Path(__file__).parent).parts:
        return
    from kvserve.engine.core.engine_core import EngineCore

    contain = EngineCore._check_containable

    def check(core: EngineCore, error: Exception) -> None:
        if isinstance(error, AssertionError | AttributeError | NameError | TypeError):
            raise error
        contain(core, error)

    monkeypatch.setattr(EngineCore, "_check_containable", check)
