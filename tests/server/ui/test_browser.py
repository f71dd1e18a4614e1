"""The live page in a real Chromium: what it loads, shows as text, and asks a key for."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest

from tests.server.conftest import MODEL, StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.real_server import Server
from tests.server.ui.browser import SIZES, VIEWS, Watched, ask

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", ["/", "/docs", "/redoc"])
def test_pages_load_from_this_machine_alone(live: Server, watched: Watched, path: str) -> None:
    page = watched.ready(live.url + path)
    page.wait_for_timeout(500)
    assert page.title().startswith("kvserve")
    watched.check()


def test_the_page_and_the_api_lead_to_each_other(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    page.click("header a")
    page.wait_for_selector("body[data-ready] #operations")
    page.click("header a >> nth=0")
    page.wait_for_selector("body[data-ready] #sentence")


def test_what_is_written_is_text(start_server: StartServer, watched: Watched) -> None:
    fake = start_server(FakeEngine(max_model_len=50_000), allow_kv_trace=True)
    page = watched.ready(fake.url)
    script = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    ask(page, f"SAY[{script}] {script}", 2000)
    assert script in page.inner_text(".said")
    assert page.inner_text(".answer .tokens") == script
    page.click("#cache button:has-text('Show formatted')")
    assert page.inner_text(".answer .markdown").strip() == script
    page.click("#new")
    word = "w" * 10_000
    ask(page, f"SAY[{word}]", 12_000)
    assert page.inner_text(".answer .tokens") == word
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.click("#new")
    page.evaluate("document.getElementById('prompt').value = 'a \\ud800 b'")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".answer .error")
    assert page.evaluate("window.hacked") is None
    assert not page.locator("#thread script, #thread img").count()


def test_a_key_is_asked_for_and_kept_in_the_tab(
    start_server: StartServer, watched: Watched
) -> None:
    fake = start_server(api_key=("right",))
    page = watched.open(fake.url)
    for key, wrong in (("wrong", False), ("right", True)):
        page.wait_for_selector("#key-dialog[open]")
        assert page.is_visible("#key-wrong") is wrong
        page.fill("#key", key)
        page.press("#key", "Enter")
        page.wait_for_timeout(300)
    page.wait_for_selector("body[data-ready]")
    assert MODEL in page.inner_text("#served")
    page.goto(fake.url + "/docs")
    page.wait_for_selector("body[data-ready]")
    other = page.context.new_page()
    other.goto(fake.url)
    other.wait_for_selector("#key-dialog[open]")


def test_the_keyboard_is_enough(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    page.focus("#tab-overview")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#view-playground") and not page.is_visible("#view-overview")
    ask(page, "Hello", 200)
    page.focus(".answer .tokens")
    page.keyboard.press("End")
    assert "held by 100.0 %" in page.inner_text("#strip-text")
    page.keyboard.press("Home")
    first = page.inner_text("#strip-text")
    assert "4 layers x 2 heads" in first
    page.keyboard.press("Escape")
    assert not page.is_visible("#strip") and not page.locator(".token.current").count()
    watched.check()


REACHED = """() => {
  const all = [...document.querySelectorAll('button, select, input, textarea, summary, a[href]')];
  return all.filter(one => one.checkVisibility() && !one.disabled && one.tabIndex >= 0
    && !one.closest('dialog')).map(one => one.id || one.textContent.slice(0, 30));
}"""
FOCUSED = "document.activeElement.id || document.activeElement.textContent.slice(0, 30)"


def test_tab_reaches_every_control(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    ask(page, "Hello", 200)
    page.click("#tab-overview")
    page.wait_for_selector(
        "#running-card", state="hidden"
    )  # a row that leaves takes its button along
    for view in VIEWS:
        page.click(f"#tab-{view}")
        wanted, found = set(page.evaluate(REACHED)), set()
        page.evaluate("document.activeElement.blur()")
        for _ in range(40):
            page.keyboard.press("Tab")
            found.add(page.evaluate(FOCUSED))
        assert wanted and wanted <= found, view


@pytest.mark.parametrize("size", SIZES, ids=["desktop", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_serious_for_axe(
    live: Server, watched: Watched, theme: str, size: dict[str, int]
) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="no axe-core: extra `browser`")
    source = (resources.files(axe) / "axe.min.js").read_text()
    watched.page.set_viewport_size(size)
    page = watched.ready(live.url)
    page.emulate_media(color_scheme=theme)
    page.click("#try-it")
    page.wait_for_selector("#try-tokens:not([hidden])")
    ask(page, "Hello", 200)
    page.evaluate(source)
    for view in VIEWS:
        page.click(f"#tab-{view}")
        page.wait_for_timeout(300)
        check_axe(page, view)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), view
    page.click("#tab-playground")
    page.click("#open-settings")
    check_axe(page, "settings")


def check_axe(page: Any, where: str) -> None:
    found = page.evaluate("axe.run()")
    assert found["passes"], "axe looked at nothing"
    serious = [
        (one["id"], [node["html"][:200] for node in one["nodes"][:3]])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert serious == [], where


def test_the_theme_button_changes_colours_and_is_remembered(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    seen = {}
    for theme in ("dark", "light"):
        while theme not in page.inner_text("#theme"):
            page.click("#theme")
        seen[theme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert seen["light"] != seen["dark"]
    page.reload()
    assert "light" in page.inner_text("#theme")
