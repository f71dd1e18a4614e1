"""The first screen in a real Chromium: what is saved, "Try it", the blocks and their ghosts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import StartServer
from tests.server.real_server import Server
from tests.server.ui.browser import Watched, send, setting

pytestmark = pytest.mark.slow


def test_try_it_compares_with_the_full_cache(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    page.click("#try-it")
    page.wait_for_selector("#try-tokens:not([hidden])")
    none, kara = page.locator("#try-runs .quiet").all_inner_texts()
    assert "for 525 of 525 tokens" in none
    assert "of 525 tokens" in kara and "for 525 of" not in kara
    widths = page.locator("#try-runs .bar span").evaluate_all(
        "all => all.map(one => parseFloat(one.style.width))"
    )
    assert widths[0] == 100 > widths[1] > 0
    verdict = page.inner_text("#try-verdict")
    assert "answer" in verdict and "% less memory" in verdict
    page.click("#try-tokens")
    assert page.locator("#view-playground .answers.two .tokens .token.some").count() > 50
    assert page.inner_text(".answer.chosen .chip") == "kara"
    assert kara.split(" for ")[1] in page.inner_text("#cache .counts"), "one count, wherever"
    page.click("#tab-overview")
    page.wait_for_selector("#sentence:has-text('Nothing runs now. At the fullest, 1 request')")
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


TAKE = """async (event) => {
  const { take } = await import("/ui/app.js");
  take(event);
}"""


def crowd(server: Any, requests: int = 64, pool: int = 4000, **values: Any) -> dict[str, Any]:
    """An event with so many requests of 900 tokens, from one of the server's; a block has 1 KiB.

    ``values`` are those of each request.
    """
    with server.http.stream("GET", "/v1/kv/events") as response:
        line = next(line for line in response.iter_lines() if line.startswith("data: "))
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    one: dict[str, Any] = {
        "policy": "kara",
        "logical_tokens": 900,
        "held_tokens": 300,
        "blocks": 20,
    }
    one |= {"log_blocks": 4, "compactions": 3, "remainder_entries": 8} | values
    one["held_bytes"] = 1024 * one["blocks"]
    event["requests"] = [{"request_id": f"cmpl-{i:032x}", **one} for i in range(requests)]
    runs = [(4 + i % requests if i % 3 else 0, 5) for i in range(pool // 5)]
    event["cells"] = {"blocks_per_cell": 1, "runs": [part for run in runs for part in run]}
    event |= {"blocks_total": pool, "blocks_free": 0, "bytes_total": 1024 * pool}
    event |= {"num_running": requests, "tokens_logical": one["logical_tokens"] * requests}
    return event | {"tokens_held": one["held_tokens"] * requests}


def tell(page: Any, event: dict[str, Any]) -> None:
    """Give the page these figures, and let it draw them: its clock stands still otherwise."""
    page.evaluate(TAKE, event)
    page.clock.run_for(200)


@pytest.fixture
def stopped(start_server: StartServer, watched: Watched) -> tuple[Any, Any]:
    """A server that does nothing, and a page whose clock goes only when it is told to."""
    server = start_server()
    watched.page.clock.install(time=0)
    page = watched.ready(server.url)
    page.wait_for_selector("#since:has-text('Since')")  # the server's own event, the only one
    page.clock.pause_at(3600)
    return server, page


def test_a_recording_plays_until_something_runs(stopped: tuple[Any, Any]) -> None:
    server, page = stopped
    page.clock.run_for(300)
    page.wait_for_selector("#recorded:not([hidden])")
    assert page.inner_text("#film") == "Pause"
    shares = []
    for _ in range(14):
        page.clock.run_for(1000)
        shares.append(int(page.inner_text("#share").removesuffix(" %")))
    assert max(shares) > 40 and len(set(shares)) > 5, shares
    assert page.inner_text("#film") == "Play again", "it ends by itself"
    assert "3 chains of sums of kvserve/tiny-long under kara" in page.inner_text("#recorded")
    assert page.inner_text("#nobody") == "Nothing runs.", "a recording is no request"
    assert page.get_attribute("#cells", "aria-label").endswith("just released")
    page.click("#film")
    assert page.inner_text("#film") == "Pause"
    tell(page, crowd(server, 2))
    assert not page.is_visible("#recorded")
    assert "2 requests run, remembering 1,800 tokens in the space of 600." in page.inner_text("h2")
    tell(page, crowd(server, 2) | {"num_running": 0, "requests": []})
    assert not page.is_visible("#recorded"), "what has run here is shown instead"


def test_figures_say_what_they_are_of(stopped: tuple[Any, Any]) -> None:
    """The full cache takes whole blocks too; a query log is told apart, where there is one."""
    server, page = stopped
    words = {}
    cases: dict[str, dict[str, Any]] = {
        "saved": {},
        "logged": {"logical_tokens": 300, "blocks": 24, "compactions": 0},
        "waiting": {"logical_tokens": 300, "blocks": 19, "log_blocks": 0, "compactions": 0},
        "none": {"policy": "none", "logical_tokens": 300, "blocks": 20, "log_blocks": 0}
        | {"compactions": 0, "remainder_entries": 0},
    }
    for name, values in cases.items():
        tell(page, crowd(server, 3, **values))
        words[name] = page.inner_text("#figure").replace("\n", " ")
        bars = [page.inner_text("#with"), page.inner_text("#log-note")]
        assert ("for the query log" in bars[1]) == (name in ("saved", "logged")), name
        if name == "saved":
            assert page.inner_text("#without") == "171.0 KiB" and bars[0] == "60.0 KiB"
    assert words == {
        "saved": "65 % less memory",
        "logged": "26 % more memory, for the query log",
        "waiting": "0 % less: nothing is compacted yet",
        "none": "0 % less: policy none keeps everything",
    }


def test_idle_figures_are_of_the_fullest_moment(stopped: tuple[Any, Any]) -> None:
    server, page = stopped
    idle = crowd(server, 1) | {"num_running": 0, "requests": [], "tokens_evicted_total": 10**6}
    for event in (crowd(server, 2), crowd(server, 5), crowd(server, 1, held_tokens=800), idle):
        tell(page, event)
    told = page.inner_text("#sentence")
    assert told.endswith(
        "At the fullest, 5 requests remembered 4,500 tokens in the space of 1,500."
    )
    assert page.inner_text("#without") == "285.0 KiB" and page.inner_text("#share") == "65 %"
