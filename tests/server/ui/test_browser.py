"""The live page in a real Chromium, without a head: extra `browser`, and Debian's `chromium`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import MODEL, StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.real_server import Server

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
KARA = ("--policy", "kara", "--policy.window", "64", "--policy.buffer", "8")
VIEWS = ("pool", "playground", "request")

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: extra `browser`")
if CHROMIUM is None:
    pytest.skip("no Chromium: apt-get install chromium", allow_module_level=True)


@dataclass
class Watched:
    """A page, what it asked other places for, and what it complained of."""

    page: Any
    host: str = ""
    elsewhere: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, url: str) -> Any:
        self.host = urlsplit(url).netloc
        page = self.page
        page.on("request", self._on_request)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._on_console)
        page.goto(url)
        return page

    def _on_request(self, asked: Any) -> None:
        if urlsplit(asked.url).netloc != self.host:
            self.elsewhere.append(asked.url)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def check(self) -> None:
        assert self.elsewhere == []
        assert self.complaints == []


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def watched(chromium: Any) -> Iterator[Watched]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(30_000)
    yield Watched(context.new_page())
    context.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(*KARA, "--allow-kv-trace", "--num-gpu-blocks-override", "600")
    yield server
    server.stop()


def ready(watched: Watched, url: str) -> Any:
    page = watched.open(url)
    page.wait_for_selector("body[data-ready]")
    return page


def ask(page: Any, text: str, tokens: int = 200) -> None:
    """Send a prompt and wait for all answers."""
    page.click("#tab-playground")
    page.fill("#prompt", text)
    page.fill("#max-tokens", str(tokens))
    page.check("#ignore-eos")
    page.click("#send")
    page.wait_for_selector("#send:not([disabled])")


def shares(page: Any) -> list[tuple[float, float]]:
    """Of each answer, the share of grey entries as the page counts, and as `usage` says."""
    found = page.locator(".counts").evaluate_all(
        "all => all.map(one => [Number(one.dataset.grey), Number(one.dataset.usage)])"
    )
    return [(grey, usage) for grey, usage in found]


@pytest.mark.parametrize("path", ["/", "/docs", "/redoc"])
def test_pages_load_from_this_machine_alone(server: Server, watched: Watched, path: str) -> None:
    page = ready(watched, server.url + path)
    page.wait_for_timeout(500)
    assert page.title().startswith("kvserve")
    watched.check()


def test_a_chat_streams_and_its_tokens_grow_grey(server: Server, watched: Watched) -> None:
    page = ready(watched, server.url)
    page.click("#tab-playground")
    page.wait_for_selector("#examples button >> nth=2")
    page.click("#examples button >> nth=0")
    assert "Find" in page.input_value("#prompt")
    page.click("#send")
    page.wait_for_selector(".pane .token.some")  # while it streams
    page.wait_for_selector("#send:not([disabled])")
    [(grey, usage)] = shares(page)
    assert grey == usage > 0.1
    answer = page.locator(".pane article .tokens >> nth=1")
    assert "answer" in answer.inner_text()
    assert answer.locator(".token.some").count() > 50
    page.click("#tab-request")
    page.wait_for_selector("#events tr >> nth=1")
    assert "due" in page.inner_text("#events")
    watched.check()


def test_two_policies_side_by_side(server: Server, watched: Watched) -> None:
    page = ready(watched, server.url)
    page.click("#tab-playground")
    page.check("#side-by-side")
    ask(page, "Hello", 300)
    (kept, by_usage), (none, nothing) = shares(page)
    assert kept == by_usage > 0.3 and none == nothing == 0
    counts = page.locator(".counts").all_inner_texts()
    assert "kara" in counts[0] and "none" in counts[1]
    watched.check()


def test_the_picker_has_every_policy_and_shows_what_the_server_refuses(
    server: Server, watched: Watched
) -> None:
    page = ready(watched, server.url)
    page.click("#tab-playground")
    listed = server.http.get("/v1/kv/policies").json()["data"]
    select = page.locator(".policy select >> nth=0")
    names = select.locator("option").evaluate_all("all => all.map(one => one.value)")
    assert names[1:] == [policy["name"] for policy in listed]
    select.select_option("snapkv")
    page.locator(".policy summary >> nth=0").click()
    budget = page.locator("[name=budget] >> nth=0")
    assert page.locator(f"#{budget.get_attribute('aria-describedby')}").inner_text()
    budget.fill("-3")
    ask(page, "Hello", 20)
    said = page.inner_text(".pane .error")
    answer = server.complete(kv_policy={"name": "snapkv", "budget": -3})
    assert said == answer.json()["error"]["message"]


def test_the_pool_is_drawn_while_requests_run(server: Server, watched: Watched) -> None:
    page = ready(watched, server.url)
    page.click("#tab-playground")
    page.fill("#prompt", "Hello")
    page.fill("#max-tokens", "1500")
    page.check("#ignore-eos")
    page.click("#send")
    page.click("#tab-pool")
    page.wait_for_selector("#running button")
    page.click("#running button")
    assert page.get_attribute("#tab-request", "aria-selected") == "true"
    page.click("#tab-playground")
    page.click("#stop")
    page.wait_for_selector("#send:not([disabled])")
    page.click("#tab-pool")
    page.wait_for_selector("#nobody:not([hidden])")
    assert "600 cells" in page.get_attribute("#cells", "aria-label")
    watched.check()


def test_what_is_written_is_text(start_server: StartServer, watched: Watched) -> None:
    fake = start_server(FakeEngine(max_model_len=50_000), allow_kv_trace=True)
    page = ready(watched, fake.url)
    script = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    ask(page, f"SAY[{script}] {script}", 2000)
    prompt, answer = page.locator(".pane article .tokens").all_inner_texts()
    assert answer == script and script in prompt
    page.click("#clear")
    word = "w" * 10_000
    ask(page, f"SAY[{word}]", 12_000)
    assert page.locator(".pane article .tokens >> nth=1").inner_text() == word
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.click("#clear")
    page.evaluate("document.getElementById('prompt').value = 'a \\ud800 b'")
    page.click("#send")
    page.wait_for_selector(".pane .error")
    assert page.evaluate("window.hacked") is None
    assert not page.locator(".tokens script, .tokens img").count()


def test_a_key_is_asked_for_and_kept_in_the_tab(
    start_server: StartServer, watched: Watched
) -> None:
    fake = start_server(api_keys=("right",))
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


def test_the_keyboard_is_enough(server: Server, watched: Watched) -> None:
    page = ready(watched, server.url)
    page.focus("#tab-pool")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#view-playground") and not page.is_visible("#view-pool")
    ask(page, "Hello", 200)
    page.focus(".pane article .tokens >> nth=1")
    page.keyboard.press("End")
    assert "held by 100.0 %" in page.inner_text("#strip-text")
    page.keyboard.press("Home")
    first = page.inner_text("#strip-text")
    assert "4 layers x 2 heads" in first
    page.keyboard.press("Escape")
    assert not page.is_visible("#strip")
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_serious_for_axe_in_either_theme(
    server: Server, watched: Watched, theme: str, background: Callable[[Any], str]
) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="no axe-core: extra `browser`")
    source = (resources.files(axe) / "axe.min.js").read_text()
    page = ready(watched, server.url)
    page.emulate_media(color_scheme=theme)
    ask(page, "Hello", 200)
    seen = {theme: background(page)}
    page.evaluate(source)
    for view in VIEWS:
        page.click(f"#tab-{view}")
        page.wait_for_timeout(300)
        found = page.evaluate("axe.run()")
        assert found["passes"], "axe looked at nothing"
        serious = [
            (one["id"], [node["html"][:200] for node in one["nodes"][:3]])
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], view
    while "dark" not in page.inner_text("#theme"):
        page.click("#theme")
    seen["dark"] = background(page)
    while "light" not in page.inner_text("#theme"):
        page.click("#theme")
    seen["light"] = background(page)
    assert seen["light"] != seen["dark"]


@pytest.fixture
def background() -> Callable[[Any], str]:
    def read(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    return read
