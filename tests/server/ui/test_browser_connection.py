"""The live page while its server loads, stops, comes back with another model, or is idle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvserve.config import EngineConfig
from tests.server.conftest import MODEL, RunningServer, StartServer, run_server
from tests.server.fake_engine import FakeEngine
from tests.server.ui.browser import Watched, answered, send
from tests.server.ui.test_event_feed import STATS, VIEW

pytestmark = pytest.mark.slow


def state(page: Any, wanted: str) -> None:
    page.wait_for_selector(f"body[data-link={wanted}]")


@pytest.mark.parametrize("keys", [(), ("k",)], ids=["open", "keyed"])
def test_a_page_that_is_opened_while_the_model_loads_goes_on_by_itself(
    start_server: StartServer, watched: Watched, keys: tuple[str, ...]
) -> None:
    server = start_server(ready=False, api_keys=keys)
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
    first = run_server(FakeEngine(), served_names=("org/first",))
    server = next(first)
    page = watched.ready(server.url)
    assert "org/first" in page.inner_text("#served")
    next(first, None)
    state(page, "down")
    assert "cannot be reached" in page.inner_text("#banner")
    assert page.eval_on_selector("#bars", "one => getComputedStyle(one).filter") == "grayscale(1)"
    port = urlsplit(server.url).port or 0
    engine = FakeEngine(max_model_len=4096)
    second = run_server(engine, port=port, served_names=("org/second",))
    next(second)
    state(page, "live")
    page.wait_for_selector("#served:has-text('org/second')")
    page.click("#tab-playground")
    send(page, "SAY[hi]")
    answered(page)
    assert page.inner_text(".answer .markdown").strip() == "hi"
    assert page.eval_on_selector("#bars", "one => getComputedStyle(one).filter") == "none"
    next(second, None)


def test_what_is_offered_is_for_the_served_model(
    start_server: StartServer, watched: Watched
) -> None:
    titles = {}
    for model in ("kvserve/tiny", "kvserve/tiny-long", "org/any"):
        config = EngineConfig.from_flat(model=model)
        server = start_server(config=config, served_names=("served",))
        page = watched.ready(server.url)
        page.click("#tab-playground")
        page.wait_for_selector("#examples button")
        titles[model] = page.locator("#examples button").all_inner_texts()
    assert titles["kvserve/tiny"] == ["Chain of sums", "Needle in 512 tokens"]
    assert titles["kvserve/tiny-long"] == ["Chain of sums", "Long trace"]
    assert titles["org/any"] == ["A long answer", "A table"]


def test_idle_figures_are_zero(start_server: StartServer, watched: Watched) -> None:
    server = start_server()
    server.engine.stats = replace(STATS, generation_tokens_total=0)
    page = watched.ready(server.url)
    generated = page.locator("#charts .key.one output").first
    for total in (5000, 10_000, 15_000):
        page.wait_for_timeout(700)
        server.engine.stats = replace(STATS, generation_tokens_total=total)
    page.wait_for_function("one => one.textContent !== '0/s'", arg=generated.element_handle())
    page.wait_for_function("one => one.textContent === '0/s'", arg=generated.element_handle())
    server.engine.stats = replace(STATS, num_running=0, requests=(), steps_total=1)
    running = page.locator("#charts .chart >> nth=1").locator("output").first
    page.wait_for_function("one => one.textContent === '0'", arg=running.element_handle())


def test_figures_are_sums_over_those_who_run(start_server: StartServer, watched: Watched) -> None:
    server: RunningServer = start_server()
    stats = replace(STATS, tokens_logical=90, tokens_held=40)
    server.engine.token_bytes = 91
    server.engine.pool = replace(VIEW, stats=stats)
    page = watched.ready(server.url)
    page.wait_for_selector("#running button")
    assert "One request runs, remembering 90 tokens in the space of 40" in page.inner_text("h2")
    assert page.inner_text("#without") == "90 tokens, 8.0 KiB"
    assert page.inner_text("#with") == "40 tokens, 4.0 KiB"
    assert page.inner_text("#share") == "50 %"
    assert "5 of 10 blocks in use" in page.inner_text("#counts")
    row = page.inner_text("#running tr")
    assert "#1" in row and "40 of 90" in row and "cmpl-a" not in row
