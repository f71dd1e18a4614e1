"""The first screen in a real Chromium: what is saved, "Try it", the blocks and their ghosts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvserve.config import EngineConfig
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
    assert "for 525 of 525 tokens" in none
    assert "of 525 tokens" in kara and "for 525 of" not in kara
    widths = page.locator("#try-runs .bar span").evaluate_all(
        "all => all.map(one => parseFloat(one.style.width))"
    )
    assert widths[0] == 100 > widths[1] > 0
    verdict = page.inner_text("#try-verdict")
    assert "answer" in verdict and "%" not in verdict, "one figure: that above"
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
    setting(page, max_tokens=3500, ignore_eos=True)
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
    page.wait_for_selector("#running-card", state="hidden")
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
        assert page.inner_text("#share-of") == "less memory"
    assert max(shares) > 40 and len(set(shares)) > 5, shares
    assert page.inner_text("#film") == "Play again", "it ends by itself"
    assert "3 chains of sums of kvserve/tiny-long under kara" in page.inner_text("#recorded")
    assert not page.is_visible("#running-card"), "a recording is no request"
    assert page.get_attribute("#cells", "aria-label").endswith("just released")
    page.click("#film")
    assert page.inner_text("#film") == "Pause"
    tell(page, crowd(server, 2))
    assert not page.is_visible("#recorded")
    assert "2 requests run, remembering 1,800 tokens in the space of 600." in page.inner_text("h2")
    tell(page, crowd(server, 2) | {"num_running": 0, "requests": []})
    assert not page.is_visible("#recorded"), "what has run here is shown instead"


def test_less_motion_shows_the_end_of_the_recording(
    start_server: StartServer, watched: Watched
) -> None:
    watched.page.emulate_media(reduced_motion="reduce")
    page = watched.ready(start_server().url)
    page.wait_for_selector("#film:text-is('Play again')")
    assert int(page.inner_text("#share").removesuffix(" %")) > 30


def test_figures_say_what_they_are_of(stopped: tuple[Any, Any]) -> None:
    """The full cache takes whole blocks too; a query log is told apart, where there is one."""
    server, page = stopped
    words = {}
    cases: dict[str, dict[str, Any]] = {
        "saved": {},
        "logged": {"logical_tokens": 300, "blocks": 24, "compactions": 0},
        "more": {"logical_tokens": 300, "blocks": 24},
        "waiting": {"logical_tokens": 300, "blocks": 19, "log_blocks": 0, "compactions": 0},
        "none": {"policy": "none", "logical_tokens": 300, "blocks": 20, "log_blocks": 0}
        | {"compactions": 0, "remainder_entries": 0},
    }
    for name, values in cases.items():
        tell(page, crowd(server, 3, **values))
        words[name] = page.inner_text("#figure").replace("\n", " ")
        bars = [page.inner_text("#with"), page.inner_text("#log-note")]
        assert ("for the query log" in bars[1]) == ("log_blocks" not in values), name
        if name == "saved":
            assert page.inner_text("#without") == "171.0 KiB" and bars[0] == "60.0 KiB"
    assert words == {
        "saved": "65 % less memory",
        "logged": "… not yet compressed",
        "more": "26 % more memory, for the query log",
        "waiting": "… not yet compressed",
        "none": "0 % less: policy none keeps everything",
    }


def test_what_keeps_everything_is_not_called_compressed(stopped: tuple[Any, Any]) -> None:
    """The figures are of those under a policy; each bar is called what it shows."""
    server, page = stopped
    event = crowd(server, 3)
    event["requests"][0] |= {"policy": "none", "log_blocks": 0, "compactions": 0}
    tell(page, event)
    assert page.inner_text("#with-name") == "With kara" and page.inner_text("#share") == "65 %"
    told = "2 requests run beside 1 with the full cache, remembering 1,800 tokens"
    assert told in page.inner_text("#sentence") and page.inner_text("#with") == "40.0 KiB"
    event["requests"][1] |= {"policy": "snapkv", "logical_tokens": 300}
    event["requests"][2] |= {"logical_tokens": 300, "compactions": 0}
    tell(page, event)
    assert page.inner_text("#with-name") == "Compressed"
    assert page.inner_text("#figure").split("\n") == ["…", "not yet compressed"]
    tell(page, crowd(server, 2, policy="none"))
    assert page.inner_text("#with-name") == "As it is"


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


def test_one_compaction_is_one(stopped: tuple[Any, Any]) -> None:
    server, page = stopped
    tell(page, crowd(server) | {"compactions_total": 1, "blocks_released_total": 1})
    assert page.inner_text("#since") == "Since the start 1 compaction has released 1 block."
    tell(page, crowd(server) | {"compactions_total": 2, "blocks_released_total": 0})
    assert page.inner_text("#since") == "Since the start 2 compactions have released 0 blocks."


def test_charts_have_data_or_are_not_there(stopped: tuple[Any, Any]) -> None:
    server, page = stopped
    idle = crowd(server, 1) | {"num_running": 0, "num_waiting": 0, "requests": []}
    totals = ["generation_tokens_total", "prompt_tokens_total", "preemptions_total", "swaps_total"]
    idle |= dict.fromkeys(totals, 0)
    tell(page, idle)
    page.clock.run_for(1000)
    assert page.locator("#charts .chart >> visible=true").count() == 0
    tell(page, idle | {"generation_tokens_total": 5000})
    page.clock.run_for(1000)
    generated = page.locator("#charts .key.one output").first
    assert generated.inner_text() == "5,000/s"
    assert page.locator("#charts .chart >> visible=true").count() == 1
    page.clock.run_for(1000)
    assert generated.inner_text() == "0/s", "what nobody reports any more is zero"
    page.clock.run_for(181_000)
    assert page.locator("#charts .chart >> visible=true").count() == 0


LOOK = """async (cells) => {
  const { columnsFor } = await import("/ui/overview/block_map.js");
  const canvas = document.getElementById("cells"), context = canvas.getContext("2d");
  const step = canvas.clientWidth / columnsFor(100, canvas.clientWidth);
  return Array.from({ length: cells }, (_, i) =>
    [...context.getImageData(Math.round(i * step) + step / 2 - 1, 2, 1, 1).data].join());
}"""
MARKS = """() => [...document.querySelectorAll("#legend canvas")].map((canvas) => {
  const middle = Math.floor(canvas.width / 2), context = canvas.getContext("2d");
  return [...context.getImageData(middle, 2, 1, 1).data].join();
})"""


def test_the_map_is_whole_and_drawn_as_its_legend_says(stopped: tuple[Any, Any]) -> None:
    server, page = stopped
    event = crowd(server, 1)
    event["cells"] = {"blocks_per_cell": 2, "runs": [4, 1, 1, 1, 2, 1, 3, 1, 0, 16_380]}
    tell(page, event | {"blocks_total": 32_767})
    assert "16,384 cells" in page.get_attribute("#cells", "aria-label")
    assert "stands for 2 blocks and shows the first" in page.inner_text("#cell")
    event["cells"] = {"blocks_per_cell": 1, "runs": [4, 1, 1, 1, 2, 1, 3, 1, 0, 96]}
    tell(page, event | {"blocks_total": 100})
    seen = page.evaluate(LOOK, 5)
    request, _, cached, logged, coded, free = page.evaluate(MARKS)
    assert seen[1:] == [cached, logged, coded, free], "the legend is drawn as the map is"
    assert len({request, cached, logged, coded, free}) == 5


def test_entries_in_fewer_bits_have_a_shade_of_their_own(
    start_server: StartServer, watched: Watched
) -> None:
    config = EngineConfig.from_flat(model="kvserve/tiny", kv_cache_dtype="k8v4")
    page = watched.ready(start_server(config=config, allow_kv_trace=True).url)
    assert page.get_attribute("body", "data-bits") == "k8v4"
    page.click("#tab-playground")
    assert "held, in fewer bits (k8v4)" in page.inner_text("#token-legend")
    other = watched.ready(start_server(allow_kv_trace=True).url)
    assert other.get_attribute("body", "data-bits") is None
    other.click("#tab-playground")
    assert "fewer bits" not in other.inner_text("#token-legend")


DRAWN = """() => {
  window.drawn = 0;
  const canvas = document.getElementById("cells"), own = canvas.getContext.bind(canvas);
  canvas.getContext = (kind) => (window.drawn++, own(kind));
  window.rows = 0;
  new MutationObserver((all) => all.forEach(({ addedNodes, removedNodes }) => {
    window.rows += addedNodes.length + removedNodes.length;
  })).observe(document.getElementById("running"), { childList: true });
}"""


def test_sixty_updates_a_second_are_drawn_ten_times(stopped: tuple[Any, Any]) -> None:
    server, page = stopped
    event = crowd(server)
    tell(page, event)
    page.evaluate(DRAWN)
    for step in range(60):
        event["cells"]["runs"] = event["cells"]["runs"][2:] + event["cells"]["runs"][:2]
        event["requests"][0]["logical_tokens"] += 64
        page.evaluate(TAKE, event | {"time": event["time"] + step / 60})
        page.clock.run_for(17)
    page.clock.run_for(200)
    assert 5 <= page.evaluate("window.drawn") <= 12
    assert page.evaluate("window.rows") == 0, "rows stay as long as their requests run"
    assert page.locator("#running tr").count() == 64
    assert f"{64 * 900 + 60 * 64:,} tokens" in page.inner_text("#sentence")


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
    page.wait_for_selector(".answer .token >> nth=50", state="attached")
    page.wait_for_timeout(600)
    page.evaluate(SHIFTS)
    page.wait_for_selector(".answer .token >> nth=400", state="attached")
    assert page.evaluate("window.shifts") < 0.1


@pytest.mark.parametrize("width", [390, 768, 1440])
def test_the_hero_keeps_its_places(live: Server, watched: Watched, width: int) -> None:
    """The paragraph moved with each line that the sentence above it had, and all below the chart
    as that came and went."""
    watched.page.set_viewport_size({"width": width, "height": 900})
    page = watched.ready(live.url)
    page.evaluate("""() => {
      const keep = document.getElementById("view-overview").cloneNode(true);
      document.getElementById("view-overview").replaceWith(keep);  // nothing else writes into it
    }""")
    places = []
    for sentence, hidden in (
        ("Nothing runs now.", True),
        ("2 requests run, remembering 12,345 tokens in the space of 6,789.", False),
        ("Nothing runs now. At the fullest, 1 request remembered 1,186 tokens in the space of 650.",
         False),
    ):  # fmt: skip
        page.evaluate(
            """([sentence, hidden]) => {
              document.getElementById("sentence").textContent = sentence;
              document.getElementById("history").hidden = hidden; }""",
            [sentence, hidden],
        )
        places.append(
            page.evaluate(
                """() => ["what", "bars", "try"].map(
                  (id) => document.getElementById(id).getBoundingClientRect().y)"""
            )
        )
    assert places[0] == places[1] == places[2]
