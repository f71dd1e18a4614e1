"""A page in a real Chromium, and what tests do with it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
SIZES = [DESKTOP, PHONE]
VIEWS = ("overview", "playground", "requests")


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

    def ready(self, url: str) -> Any:
        page = self.open(url)
        page.wait_for_selector("body[data-ready]")
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


def setting(page: Any, **values: Any) -> None:
    """Change fields of the drawer by their ids; ``True`` and ``False`` are for boxes."""
    page.click("#tab-playground")
    page.click("#open-settings")
    for name, value in values.items():
        field_id = f"#{name.replace('_', '-')}"
        if isinstance(value, bool):
            page.set_checked(field_id, value)
        elif page.eval_on_selector(field_id, "one => one.tagName") == "SELECT":
            page.select_option(field_id, str(value))
        else:
            page.fill(field_id, str(value))
            page.dispatch_event(field_id, "change")
    page.click("#settings button.main")


def send(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Any) -> None:
    page.wait_for_selector("#send:not([hidden])")


def ask(page: Any, text: str, tokens: int = 200) -> None:
    """Send a prompt and wait for all answers."""
    setting(page, max_tokens=tokens, ignore_eos=True)
    send(page, text)
    answered(page)


def shares(page: Any) -> list[tuple[float, float]]:
    """Of each answer, the share of dropped entries as the page counts, and as `usage` says."""
    found = page.locator(".answer[data-usage]").evaluate_all(
        "all => all.map(one => [Number(one.dataset.dropped), Number(one.dataset.usage)])"
    )
    return [(dropped, usage) for dropped, usage in found]
