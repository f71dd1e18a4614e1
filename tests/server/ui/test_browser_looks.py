"""How the live page looks: contrast of its marks, forced colours, less motion, and the phone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.real_server import Server
from tests.server.ui.browser import PHONE, VIEWS, Watched, answered, send, setting

pytestmark = pytest.mark.slow

MARKS = ["--edge", "--request", "--cached", "--logged", "--coded", "--held", "--fewer"]
MARKS += ["--good", "--wait"]


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
