"""Pictures of the live page, for README and docs, from a running server under some load.

    kvserve --model kvserve/tiny --policy kara --policy.window 128 --policy.buffer 16 \\
        --num-gpu-blocks-override 600 --allow-kv-trace
    python -m bench.serving.screenshots                       # extras `bench`, `browser`; chromium
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

_POLICIES: tuple[Any, ...] = (None, "none", {"name": "snapkv", "budget": 128}, None, "none", None)
_SIZE = {"width": 1200, "height": 760}


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
            page = browser.new_page(viewport=_SIZE, color_scheme=theme)
            page.goto(args.url)
            page.wait_for_selector("body[data-ready]")
            with _load(args.url):
                page.wait_for_timeout(4000)
                _shoot(page, args.out / f"pool-{theme}.png")
            if theme == "light":
                _ask(page, args.out)
            page.close()
        browser.close()


def _ask(page: Any, out: Path) -> None:
    """The first example under two policies, then its events."""
    page.click("#tab-playground")
    page.click("#examples button >> nth=0")
    page.check("#side-by-side")
    page.click("#send")
    page.wait_for_selector("#send:not([disabled])", timeout=120_000)
    page.set_viewport_size({"width": 1200, "height": 1340})
    page.mouse.move(1, 1)
    page.focus(".pane article .tokens >> nth=1")
    page.keyboard.press("Home")
    for _ in range(9):
        page.keyboard.press("ArrowDown")
    _shoot(page, out / "playground.png")
    page.set_viewport_size(_SIZE)
    page.click("#tab-request")
    traced = page.locator("#request option", has_text="(kara)")
    page.select_option("#request", traced.first.get_attribute("value"))
    page.wait_for_selector("#events tr >> nth=1")
    _shoot(page, out / "request.png")


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
