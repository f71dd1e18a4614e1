"""A browser, and a real server for it: extra `browser`, and Debian's `chromium`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.real_server import Server
from tests.server.ui.browser import CHROMIUM, DESKTOP, Watched
from tests.waiting import WAIT


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: extra `browser`")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def watched(chromium: Any) -> Iterator[Watched]:
    context = chromium.new_context(viewport=DESKTOP)
    context.set_default_timeout(1000 * WAIT)
    yield Watched(context.new_page())
    context.close()


@pytest.fixture(scope="module")
def live() -> Iterator[Server]:
    """`make run`, with traces and windows that are soon full."""
    kara = ("--policy", "kara", "--policy.window", "64", "--policy.buffer", "8")
    server = Server(*kara, "--allow-kv-trace", "--num-gpu-blocks-override", "600")
    yield server
    server.stop()
