"""Pictures and an animation of the live page, for README and docs, from a running server.

    kvserve --model kvserve/tiny-long --policy kara --policy.window 128 --policy.buffer 16 \\
        --num-gpu-blocks-override 900 --allow-kv-trace
    python -m bench.serving.screenshots                       # extras `bench`, `browser`; chromium
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

_POLICIES: tuple[Any, ...] = (None, "none", {"name": "snapkv", "budget": 128}, None, "none", None)
_SIZE = {"width": 1200, "height": 760}
_FRAME_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            page = _open(browser, args.url, theme)
            with _load(args.url):
                page.wait_for_timeout(5000)
                _shoot(page, args.out / f"overview-{theme}.png")
            page.close()
        page = _open(browser, args.url, "light")
        _play(page, args.url, args.out / "live.webp")
        _shoot(page, args.out / "playground.png")
        _show_request(page, args.out / "request.png")
        browser.close()


def _open(browser: Any, url: str, theme: str) -> Any:
    page = browser.new_page(viewport=_SIZE, color_scheme=theme)
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    return page


def _play(page: Any, url: str, path: Path) -> None:
    """Twenty seconds: requests that run, "Try it", then its answers event by event."""
    film = Film(page)
    with _load(url):
        film.roll(4)
    page.wait_for_selector("#nobody:not([hidden])")
    page.click("#try-it")
    while not page.is_visible("#try-tokens"):
        film.roll(_FRAME_S)
    film.roll(1.5)
    page.click("#try-tokens")
    page.mouse.move(1, 1)
    page.locator(".slider >> visible=true").last.scroll_into_view_if_needed()
    film.roll(1)
    page.locator(".slider button >> visible=true").last.click()
    film.roll(max(4.0, 20 - film.seconds))
    film.save(path)


class Film:
    """Screenshots with the times at which they were taken."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self._frames: list[tuple[bytes, float]] = []

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self._frames)

    def roll(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            picture = self._page.screenshot()
            time.sleep(max(0.0, began + _FRAME_S - time.monotonic()))
            self._frames.append((picture, time.monotonic() - began))

    def save(self, path: Path) -> None:
        """An animated WebP; equal frames are shown once, for longer."""
        from PIL import Image

        shown: list[tuple[bytes, float]] = []
        for picture, seconds in self._frames:
            if shown and shown[-1][0] == picture:
                shown[-1] = picture, shown[-1][1] + seconds
            else:
                shown.append((picture, seconds))
        size = 900, 900 * _SIZE["height"] // _SIZE["width"]
        images = [
            Image.open(io.BytesIO(picture)).convert("RGB").resize(size) for picture, _ in shown
        ]
        times = [round(1000 * seconds) for _, seconds in shown]
        options: dict[str, Any] = {
            "duration": times,
            "loop": 0,
            "quality": 55,
            "method": 4,
            "minimize_size": True,
        }
        images[0].save(path, save_all=True, append_images=images[1:], **options)


def _show_request(page: Any, path: Path) -> None:
    page.click("#tab-requests")
    page.wait_for_selector("#events tr >> nth=1")
    page.wait_for_timeout(300)
    _shoot(page, path)


def _shoot(page: Any, path: Path) -> None:
    """Save a screenshot with 128 colours, which takes a third of the bytes."""
    from PIL import Image

    page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(128).save(path, optimize=True)


@contextlib.contextmanager
def _load(url: str) -> Iterator[None]:
    """Requests that run until the context ends."""
    over = threading.Event()
    threads = [threading.Thread(target=_stream, args=(url, p, over)) for p in _POLICIES]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _stream(url: str, policy: Any, over: threading.Event) -> None:
    body = {"prompt": "Let Kevin7; Rachel8;" * 20, "max_tokens": 2500, "ignore_eos": True}
    body |= {"stream": True, "kv_policy": policy}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        for _ in answer.iter_lines():
            if over.is_set():
                return


if __name__ == "__main__":
    main()
