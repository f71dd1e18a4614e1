"""Pictures and an animation of the live page, for README and docs, from a running server.

    kvserve --model kvserve/tiny-long --policy kara --num-gpu-blocks-override 360 --allow-kv-trace
    python -m bench.serving.screenshots                       # extras `bench`, `browser`; chromium

``--record PATH`` writes the recording that the page plays while nothing has run, instead.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.harness.datasets.tasks import make_samples

_POLICIES: tuple[Any, ...] = (None, "none", {"name": "snapkv", "budget": 128}, None, "none", None)
_SIZE = {"width": 1280, "height": 800}
_FRAME_S = 0.2
_SIZES = {"desktop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
_RECORDED, _FRAMES = 3, 36
_SAVES = """(least) => document.getElementById("recorded").hidden &&
  parseInt(document.getElementById("share").textContent) >= least"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--record", type=Path, help="write a recording for the page, no pictures")
    parser.add_argument("--sheet", type=Path, help="all views, sizes and themes on one picture")
    args = parser.parse_args()
    if args.record:
        args.record.write_text(json.dumps(record(args.url), separators=(",", ":")))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        if args.sheet:
            _draw_sheet(browser, args.url, args.sheet)
            return
        for theme in ("light", "dark"):
            page = _open(browser, args.url, theme)
            with _load(args.url):
                page.wait_for_function(_SAVES, arg=30)
                _shoot(page, args.out / f"overview-{theme}.png")
            page.close()
        page = _open(browser, args.url, "light")
        _play(page, args.url, args.out / "live.webp")
        page.locator("#thread").evaluate("one => { one.scrollTop -= 620; }")
        _shoot(page, args.out / "playground.png")
        _show_request(page, args.out / "request.png")
        browser.close()


def _open(browser: Any, url: str, theme: str) -> Any:
    page = browser.new_page(viewport=_SIZE, color_scheme=theme)
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    return page


def record(url: str) -> dict[str, Any]:
    """What the page's events say while chains of sums are answered, until the first one ends.

    It begins when all of them have been compacted once.
    A frame has seconds, the pool, and of each request its number, tokens read and held, blocks,
    those of the query log, and compactions. ``film.js`` makes events of it again.
    """
    info = httpx.get(f"{url}/server_info").json()
    model = info["served_model_names"][0]
    prompts = [one.turns[0] for one in make_samples("long-chain-2000", _RECORDED, 7)]
    threads = [threading.Thread(target=_answer, args=(url, model, prompt)) for prompt in prompts]
    numbers: dict[str, int] = {}
    frames: list[Any] = []
    with httpx.stream("GET", f"{url}/v1/kv/events", timeout=60) as stream:
        lines = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
        for event in itertools.chain([json.loads(next(lines))], map(json.loads, lines)):
            running = event["requests"]
            begun = sum(thread.ident is not None for thread in threads)
            newest = min((one["logical_tokens"] for one in running), default=500)
            if len(running) == begun < _RECORDED and newest >= 500:
                threads[begun].start()
            if len(running) < len(numbers):
                break  # the first one has ended
            rows = [
                [
                    numbers.setdefault(one["request_id"], len(numbers) + 1),
                    *(one["logical_tokens"], one["held_tokens"], one["blocks"]),
                    *(one["log_blocks"], one["compactions"]),
                ]
                for one in running
            ]
            if rows:
                frames.append([round(event["time"], 2), _short(event["cells"]["runs"]), rows])
    for thread in threads:
        thread.join()
    frames = [
        frame for frame in frames if len(frame[2]) == _RECORDED and all(r[5] for r in frame[2])
    ]
    frames = frames[:: 1 + len(frames) // _FRAMES]
    first = frames[0][0]
    return {
        "about": f"{_RECORDED} chains of sums",
        "model": model,
        "policy": info["policy"]["name"],
        "token_bytes": info["kv_cache"]["token_bytes"],
        "block_bytes": event["bytes_total"] // event["blocks_total"],
        "blocks": event["blocks_total"],
        "frames": [[round(time - first, 2), *rest] for time, *rest in frames],
    }


def _short(runs: list[int]) -> str:
    """``owner, cells, owner, cells, ...`` as a character each, in base 36."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    text = ""
    for owner, cells in zip(runs[::2], runs[1::2], strict=True):
        parts = [35] * (cells // 35) + [cells % 35] * (cells % 35 > 0)
        text += "".join(digits[owner] + digits[part] for part in parts)
    return text


def _answer(url: str, model: str, prompt: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status()


def _draw_sheet(browser: Any, url: str, path: Path) -> None:
    """Every view in both themes and sizes, an answer shown by token, side by side."""
    from PIL import Image

    rows = []
    for size, theme in itertools.product(_SIZES.values(), ("light", "dark")):
        page = browser.new_page(viewport=size, color_scheme=theme)
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        pictures = []
        with _load(url):
            page.wait_for_timeout(6000)
            pictures.append(page.screenshot())
        page.wait_for_selector("#running-card", state="hidden")
        page.click("#try-it")
        page.wait_for_selector("#try-tokens:not([hidden])")
        page.click("#try-tokens")
        page.wait_for_timeout(500)
        pictures.append(page.screenshot())
        page.click("#tab-requests")
        page.wait_for_selector("#events tr >> nth=1")
        page.wait_for_timeout(500)
        pictures.append(page.screenshot())
        page.close()
        images = [Image.open(io.BytesIO(one)).convert("RGB") for one in pictures]
        scale = 500 / size["height"]
        rows.append([i.resize((round(i.width * scale), 500)) for i in images])
    wide = max(sum(i.width + 16 for i in row) for row in rows)
    sheet = Image.new("RGB", (wide + 16, 516 * len(rows) + 16), "#8a8f98")
    for y, row in enumerate(rows):
        x = 16
        for image in row:
            sheet.paste(image, (x, 16 + 516 * y))
            x += image.width + 16
    sheet.save(path, quality=70, method=6)


def _play(page: Any, url: str, path: Path) -> None:
    """The recording, requests that run, "Try it", then its answers event by event."""
    film = Film(page)
    page.wait_for_selector("#recorded:not([hidden])")
    film.roll(6)  # the recording that plays by itself
    with _load(url):
        page.wait_for_function(_SAVES, arg=10)
        film.roll(4)
    page.wait_for_selector("#running-card", state="hidden")
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
    """Save a screenshot with 256 colours, which takes a third of the bytes."""
    from PIL import Image

    page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256).save(path, optimize=True)


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
