"""The live page while its server loads, stops, comes back with another model, or is idle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import MODEL, RunningServer, StartServer, run_server
from tests.server.fake_engine import FakeEngine
from tests.server.ui.browser import SIZES, Watched, answered, send
from tests.server.ui.test_event_feed import STATS, VIEW

pytestmark = pytest.mark.slow


FILTER = "one => getComputedStyle(one).filter"


def state(page: Any, wanted: str) -> None:
    page.wait_for_selector(f"body[data-link={wanted}]")


@pytest.mark.parametrize("keys", [(), ("k",)], ids=["open", "keyed"])
def test_a_page_that_is_opened_while_the_model_loads_goes_on_by_itself(
    start_server: StartServer, watched: Watched, keys: tuple[str, ...]
) -> None:
    server = start_server(ready=False, api_key=keys)
    page = watched.open(server.url)
    if keys:
        page.fill("#key", "k")
        page.press("#key", "Enter")
    state(page, "loading")
    assert "loading" in page.inner_text("#banner") and page.is_disabled("#try-it")
    server.call(server.state.mark_ready)
    state(page, "live")
    page.wait_for_selector("body[data-ready]")
    assert MODEL in page.inner_text("#served") and not page.is_visible("#banner")


def test_another_model_on_the_same_port(watched: Watched) -> None:
    first = run_server(FakeEngine(), served_model_name=("org/first",))
    server = next(first)
    page = watched.ready(server.url)
    assert "org/first" in page.inner_text("#served")
    next(first, None)
    state(page, "down")
    assert "cannot be reached" in page.inner_text("#banner")
    assert page.eval_on_selector("#proof", FILTER) == "grayscale(1)"
    port = urlsplit(server.url).port or 0
    engine = FakeEngine(max_model_len=4096)
    second = run_server(engine, port=port, served_model_name=("org/second",))
    next(second)
    state(page, "live")
    page.wait_for_selector("#served:has-text('org/second')")
    page.click("#tab-playground")
    send(page, "SAY[hi]")
    answered(page)
    assert page.inner_text(".answer .markdown").strip() == "hi"
    assert page.eval_on_selector("#proof", FILTER) == "none"
    next(second, None)


@pytest.mark.parametrize("size", SIZES, ids=["desktop", "phone"])
def test_without_a_connection_the_composer_is_there_and_nothing_is_dead(
    watched: Watched, size: dict[str, int]
) -> None:
    watched.page.set_viewport_size(size)
    running = run_server(FakeEngine())
    server = next(running)
    page = watched.ready(server.url)
    page.wait_for_selector("#try-it:not([disabled])")
    next(running, None)
    state(page, "down")
    assert page.is_disabled("#try-it")
    page.click("#tab-playground")
    for what in ("#banner", "#prompt", "#send"):
        box = page.locator(what).bounding_box()
        assert box is not None and box["y"] + box["height"] <= size["height"], what
    send(page, "SAY[hi]")
    page.wait_for_selector(".answer .error")
    assert page.inner_text(".answer .error") == "the server cannot be reached"
    assert page.inner_text(".pace") == "", "no count of tokens that never came"
    buttons = page.locator(".turn button >> visible=true").all_inner_texts()
    assert buttons == ["Edit", "Regenerate", "none"]
    assert not page.locator("#cache button >> visible=true").count()
    port = urlsplit(server.url).port or 0
    again = run_server(FakeEngine(), port=port)
    next(again)
    state(page, "live")
    page.wait_for_selector("#try-it:not([disabled])", state="attached")
    page.click(".turn button:text-is('Regenerate')")
    answered(page)
    assert page.inner_text(".answer .markdown").strip() == "hi"
    next(again, None)


def test_figures_are_sums_over_those_who_run(start_server: StartServer, watched: Watched) -> None:
    server: RunningServer = start_server()
    stats = replace(STATS, tokens_logical=90, tokens_held=40)
    server.engine.token_bytes = 91
    server.engine.pool = replace(VIEW, stats=stats)
    page = watched.ready(server.url)
    page.wait_for_selector("#running button")
    assert "One request runs, remembering 90 tokens in the space of 40" in page.inner_text("h2")
    assert page.inner_text("#without") == "8.0 KiB"
    assert page.inner_text("#with") == "4.0 KiB"
    assert page.inner_text("#share") == "50 %"
    assert "5 of 10 blocks in use" in page.inner_text("#counts")
    row = page.inner_text("#running tr")
    assert "#1" in row and "40 of 90" in row and "cmpl-a" not in row
