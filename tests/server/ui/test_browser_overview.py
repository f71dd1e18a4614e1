"""The first screen in a real Chromium: what is saved, "Try it", the blocks and their ghosts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import StartServer
from tests.server.real_server import Server
from tests.server.ui.browser import DESKTOP, PHONE, SIZES, Watched, send, setting

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", SIZES, ids=["desktop", "phone"])
def test_what_is_saved_can_be_seen_without_scrolling(
    live: Server, watched: Watched, size: dict[str, int]
) -> None:
    watched.page.set_viewport_size(size)
    page = watched.ready(live.url)
    for what in ("#sentence", "#share", "#without-bar", "#with-bar", "#link", "#try-it"):
        box = page.locator(what).bounding_box()
        assert box is not None, what
        assert box["y"] + box["height"] <= size["height"], what
        assert box["x"] + box["width"] <= size["width"], what


def test_try_it_compares_with_the_full_cache(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    page.click("#try-it")
    page.wait_for_selector("#try-tokens:not([hidden])")
    none, kara = page.locator("#try-runs .quiet").all_inner_texts()
    assert "for 525 of 525 tokens" in none and "tokens/s" in none
    assert "of 525 tokens" in kara and "for 525 of" not in kara
    widths = page.locator("#try-runs .bar span").evaluate_all(
        "all => all.map(one => parseFloat(one.style.width))"
    )
    assert widths[0] == 100 > widths[1] > 0
    verdict = page.inner_text("#try-verdict")
    assert "answer" in verdict and "% less memory" in verdict
    page.click("#try-tokens")
    assert page.locator("#view-playground .answers.two .tokens .token.some").count() > 50
    page.click("#tab-overview")
    page.wait_for_selector("#sentence:has-text('Nothing runs now. Of ')")
    watched.check()


def test_try_it_can_be_stopped(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    page.click("#try-it")
    page.click("#try-it:text-is('Stop')")
    page.wait_for_selector("#try-verdict:text-is('Stopped.')")
    assert page.inner_text("#try-it") == "Try it again" and not page.is_visible("#try-tokens")


def test_blocks_and_their_ghosts_while_requests_run(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    setting(page, max_tokens=1500, ignore_eos=True)
    send(page, "Hello")
    page.click("#tab-overview")
    page.wait_for_selector("#running button")
    page.wait_for_function(
        "() => !document.getElementById('cells').ariaLabel.includes(' 0 just released')"
    )
    assert "600 cells" in page.get_attribute("#cells", "aria-label")
    page.click("#running button")
    assert page.get_attribute("#tab-requests", "aria-selected") == "true"
    page.wait_for_selector("#request-id:has-text('chatcmpl-')")
    page.click("#tab-playground")
    page.click("#stop")
    page.click("#tab-overview")
    page.wait_for_selector("#nobody:not([hidden])")
    watched.check()


FEED = """async (given) => {
  const { take } = await import("/ui/app.js");
  const long = [];
  new PerformanceObserver((list) => long.push(...list.getEntries().map(({ duration }) => duration)))
    .observe({ entryTypes: ["longtask"] });
  const { event, seconds } = given;
  let shown = 0;
  await new Promise((done) => {
    const timer = setInterval(() => {
      event.time += 1 / 60;
      for (const request of event.requests) request.logical_tokens += 1;
      event.tokens_logical += 64;
      // Blocks move from request to request, so that there are ghosts all the time.
      const first = event.cells.runs.splice(0, 2);
      event.cells.runs.push(...first);
      take(structuredClone(event));
      if (++shown >= 60 * seconds) { clearInterval(timer); done(); }
    }, 1000 / 60);
  });
  return { long, shown };
}"""


def crowd(server: Any, requests: int = 64, blocks: int = 4000) -> dict[str, Any]:
    """An event with many requests, from one of the server's."""
    with server.http.stream("GET", "/v1/kv/events") as response:
        line = next(line for line in response.iter_lines() if line.startswith("data: "))
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    event["requests"] = [
        {
            "request_id": f"cmpl-{i:032x}",
            "policy": "kara",
            "logical_tokens": 900,
            "held_tokens": 300,
            "blocks": 20,
            "log_blocks": 4,
            "compactions": 3,
            "held_bytes": 80_000,
            "remainder_entries": 8,
        }
        for i in range(requests)
    ]
    runs = [(4 + i % requests if i % 3 else 0, 5) for i in range(blocks // 5)]
    event["cells"] = {"blocks_per_cell": 1, "runs": [part for run in runs for part in run]}
    event |= {"num_running": requests, "tokens_logical": 900 * requests, "tokens_held": 300 * 64}
    return event


@pytest.mark.parametrize("view", ["overview", "requests"])
def test_sixty_updates_a_second_with_64_requests(
    start_server: StartServer, watched: Watched, view: str
) -> None:
    server = start_server()
    page = watched.ready(server.url)
    page.click(f"#tab-{view}")
    event = crowd(server)
    page.evaluate(FEED, {"event": event, "seconds": 1})  # warm
    found = [page.evaluate(FEED, {"event": event, "seconds": 2}) for _ in range(4)]
    assert all(one["shown"] == 120 for one in found)
    assert [] in [one["long"] for one in found], f"tasks of more than 50 ms: {found}"
    if view == "overview":
        page.wait_for_selector("#running tr >> nth=63")


SHIFTS = """() => { window.shifts = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifts += entry.value;
  }).observe({ type: "layout-shift", buffered: false }); }"""


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("view", ["overview", "playground"])
def test_nothing_jumps_while_a_request_streams(
    live: Server, watched: Watched, view: str, size: dict[str, int]
) -> None:
    watched.page.set_viewport_size(size)
    page = watched.ready(live.url)
    page.wait_for_timeout(300)
    setting(page, max_tokens=2500, ignore_eos=True)
    send(page, "Hello")
    page.click(f"#tab-{view}")
    page.wait_for_timeout(600)
    page.evaluate(SHIFTS)
    page.wait_for_timeout(2500)
    assert page.evaluate("window.shifts") < 0.1
    page.click("#tab-playground")
    assert page.locator(".answer .token").count() > 100
