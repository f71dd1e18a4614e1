"""How the live page looks: contrast of its marks, forced colours, less motion, and the phone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.server.real_server import Server
from tests.server.ui.browser import PHONE, VIEWS, Watched, answered, ask, send, setting

pytestmark = pytest.mark.slow

CONTRAST = """([names, grounds]) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const probe = document.getElementById("probe");
  const light = (value) => {
    canvas.fillStyle = value;
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const value = (name) => {
    if (!name.startsWith("--")) return light(name);
    probe.style.color = `var(${name})`;
    return light(getComputedStyle(probe).color);
  };
  return Object.fromEntries(names.flatMap((name) => grounds.map((ground) => {
    const [a, b] = [value(name), value(ground)].sort((x, y) => y - x);
    return [`${name} on ${ground}`, (a + 0.05) / (b + 0.05)];
  })));
}"""
TEXT = ["--ink", "--quiet", "--accent", "--error", "--two"]
GROUNDS = ["--ground", "--paper", "--panel"]
MARKS = ["--edge", "--request", "--cached", "--logged", "--coded", "--held", "--fewer"]
MARKS += ["--good", "--wait"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_stand_out(live: Server, watched: Watched, theme: str) -> None:
    page = watched.ready(live.url)
    page.emulate_media(color_scheme=theme)
    requests = page.evaluate("""async () => {
      const { RequestNames } = await import("/ui/shared/request_names.js");
      const names = new RequestNames();
      return Array.from({ length: 64 }, (_, i) => names.colour(String(i)));
    }""")
    text = page.evaluate(CONTRAST, [TEXT, GROUNDS])
    text |= page.evaluate(CONTRAST, [["--ink"], ["--held-text", "--dropped-text"]])
    text |= page.evaluate(CONTRAST, [["--on-accent"], ["--accent"]])
    assert {pair: ratio for pair, ratio in text.items() if ratio < 4.5} == {}
    marks = page.evaluate(CONTRAST, [MARKS, GROUNDS])
    marks |= page.evaluate(CONTRAST, [["--held", "--fewer"], ["--held-text", "--dropped-text"]])
    marks |= page.evaluate(CONTRAST, [requests, ["--paper", "--free"]])
    assert {pair: ratio for pair, ratio in marks.items() if ratio < 3} == {}


def test_requests_have_hues_of_their_own(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    hues = page.evaluate("""async () => {
      const { RequestNames } = await import("/ui/shared/request_names.js");
      const names = new RequestNames();
      const parts = (i) => names.colour(String(i)).match(/[\\d.]+/g).map(Number);
      return Array.from({ length: 64 }, (_, i) => parts(i)[2]);
    }""")
    # In oklch the query log's amber is near 75 degrees, the codebook's violet near 300.
    for hue in hues:
        assert all(abs((hue - taken + 180) % 360 - 180) > 25 for taken in (75, 300)), hue
    near = [abs((a - b + 180) % 360 - 180) for a, b in pairwise(hues)]
    assert min(near) > 60, "neighbours in time are far apart"


PIXELS = """() => {
  const canvas = document.getElementById("cells");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] === 255) seen.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
  }
  return [...seen];
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_forced_colours_leave_the_picture_its_colours(
    live: Server, watched: Watched, theme: str
) -> None:
    page = watched.ready(live.url)
    ask(page, "Hello", 300)
    page.emulate_media(forced_colors="active", color_scheme=theme)
    page.click("#tab-overview")
    page.click("#try-it")
    page.wait_for_selector("#running button")
    page.wait_for_timeout(300)
    pixels = page.evaluate(PIXELS)
    assert len(pixels) >= 2 and "0,0,0" not in pixels, "requests and free blocks are told apart"
    page.wait_for_selector("#try-tokens:not([hidden])")
    page.click("#try-tokens")
    looks = "all => [...new Set(all.map(one => getComputedStyle(one).backgroundImage))].length"
    assert page.locator(".answer .token").evaluate_all(looks) >= 1
    shares = "all => new Set(all.map(one => getComputedStyle(one).backgroundSize)).size"
    assert page.locator(".answer .token").evaluate_all(shares) > 1


def test_less_motion(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    moving = "() => document.getAnimations().length + [...document.querySelectorAll('*')]" + (
        ".filter(one => parseFloat(getComputedStyle(one).transitionDuration) > 0).length"
    )
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(moving) > 0
    page.emulate_media(reduced_motion="reduce")
    page.wait_for_function(f"() => ({moving})() === 0")  # what had begun ends


def test_a_phone_shows_figures_and_does_not_zoom(live: Server, watched: Watched) -> None:
    watched.page.set_viewport_size(PHONE)
    page = watched.ready(live.url)
    header = page.locator("header").bounding_box()
    assert header is not None and header["height"] < 64, "one row"
    setting(page, max_tokens=3000, ignore_eos=True)
    send(page, "Hello")
    page.click("#tab-overview")
    page.wait_for_selector("#running button")
    held = page.locator("#running td >> nth=1").bounding_box()
    assert held is not None and held["x"] < PHONE["width"] / 2, "ids push nothing out of view"
    wide = page.eval_on_selector("#running-table", "one => [one.scrollWidth, one.clientWidth]")
    assert wide[0] > wide[1], "the table scrolls inside of its card"
    for view in VIEWS:
        page.click(f"#tab-{view}")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), view
    page.click("#tab-playground")
    page.click("#stop")
    answered(page)
    page.click("#open-cache")
    assert page.is_visible("#cache .share") and not page.is_visible("#hello")
    page.click("#open-cache")
    assert not page.is_visible("#cache") and page.is_visible("#prompt")
    page.click("#open-settings")
    drawer = page.locator("#settings").bounding_box()
    assert drawer == {"x": 0, "y": 0, **PHONE}, "all of the screen"
    small: list[Any] = (
        page.evaluate("""() => [...document.querySelectorAll('input, select, textarea')]
      .filter(one => parseFloat(getComputedStyle(one).fontSize) < 16).map(one => one.id)""")
    )
    assert small == []


def test_an_outline_leaves_with_the_pointer(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    ask(page, "Hello")
    page.locator(".answer .tokens").locator(".token >> nth=3").hover()
    assert page.locator(".token.current").count() == 1 and page.is_visible("#strip")
    page.mouse.move(5, 5)
    assert page.locator(".token.current").count() == 0 and not page.is_visible("#strip")
