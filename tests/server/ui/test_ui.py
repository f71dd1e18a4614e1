"""The live page's files and the API's pages: from this package alone, and open without a key."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import pytest

import kvserve
from bench.harness.datasets.tasks import make_samples
from tests.server.conftest import RunningServer, StartServer

PAGE = Path(kvserve.__file__).parent / "server" / "ui" / "page"
SCRIPTS = sorted(path for path in PAGE.rglob("*.js") if path.parent.name != "vendor")
PAGES = ("/", "/docs", "/redoc")


class Links(HTMLParser):
    """What a page loads or leads to, its ids, and what is written into attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href"):
                self.links.append(value or "")
            elif name == "id":
                self.ids.append(value or "")
            elif name == "style" or name.startswith("on"):
                self.inline.append(f"{tag} {name}")


@pytest.mark.parametrize("path", PAGES)
def test_pages_and_all_they_load_come_from_this_server(server: RunningServer, path: str) -> None:
    answer = server.http.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    page = Links(answer.text)
    assert page.links and not page.inline
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        assert ":" not in link and not link.startswith("/"), "a proxy may publish it under a prefix"
        assert server.http.get(urljoin(path, link)).status_code == 200


def test_scripts_load_only_each_other_and_write_no_markup(server: RunningServer) -> None:
    for script in SCRIPTS:
        text = script.read_text()
        answer = server.http.get(f"/ui/{script.relative_to(PAGE).as_posix()}")
        assert answer.text == text and answer.headers["content-type"].startswith("text/javascript")
        for name in re.findall(r'from "(.*?)"', text):
            assert name.startswith(".") and (script.parent / name).is_file()
        for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert danger not in text, f"{script.name}: {danger}"
        for place in re.findall(r'"(https?://[^"]*)"', text):
            assert place == "http://www.w3.org/2000/svg"


def test_every_element_that_a_script_asks_for_is_there() -> None:
    ids = {name: set(Links((PAGE / name).read_text()).ids) for name in ("index.html", "docs.html")}
    for script in SCRIPTS:
        wanted = set(re.findall(r'\$\("([\w-]+)"\)', script.read_text()))
        pages = ["docs.html"] if script.name == "docs.js" else ["index.html"]
        for page in pages:
            assert wanted <= ids[page], f"{script.name}: {wanted - ids[page]}"


def test_files_are_few_and_short() -> None:
    files = [path for path in PAGE.rglob("*") if path.is_file()]
    ours = [path for path in files if path.parent.name != "vendor"]
    for folder in {path.parent for path in files}:
        assert len(list(folder.iterdir())) <= 20, folder.name
    for file in ours:
        assert len(file.read_text().splitlines()) <= 350, file.name
    assert sum(file.stat().st_size for file in ours) < 150 * 1024


def test_the_library_comes_with_its_licence(server: RunningServer) -> None:
    shipped = {path.name for path in (PAGE / "vendor").iterdir()}
    assert shipped == {"marked.esm.js", "marked.LICENSE.txt"}
    assert "MarkedJS" in server.http.get("/ui/vendor/marked.LICENSE.txt").text


def test_no_ui_and_no_docs(start_server: StartServer) -> None:
    bare = start_server(ui=False, docs=False)
    for path in (*PAGES, "/ui/app.js", "/ui/style.css", "/openapi.json"):
        assert bare.http.get(path).status_code == 404
    docs_alone = start_server(ui=False)
    assert docs_alone.http.get("/").status_code == 404
    assert docs_alone.http.get("/docs").status_code == 200
    assert docs_alone.http.get("/ui/docs.js").status_code == 200
    assert docs_alone.http.get("/ui/../routes.py").status_code == 404


def test_the_examples_are_the_tasks(server: RunningServer) -> None:
    examples = json.loads(server.http.get("/ui/examples.json").text)
    tasks = [example for example in examples if "task" in example]
    assert [example["task"] for example in tasks] == ["chain", "needle-512", "long-chain-1000"]
    assert any(not example["models"] for example in examples), "there is one for any model"
    for example in tasks:
        (sample,) = make_samples(example["task"], 1, 0)
        assert example["prompt"] == sample.turns[0]


def test_the_recording_shows_what_is_saved_from_its_first_moment_on() -> None:
    film = json.loads((PAGE / "overview" / "film.json").read_text())
    for _, _, requests in film["frames"]:
        read = sum(tokens for _, tokens, *_ in requests) * film["token_bytes"]
        held = sum(blocks for _, _, _, blocks, *_ in requests) * film["block_bytes"]
        assert held < 0.9 * read and all(compactions for *_, compactions in requests)
