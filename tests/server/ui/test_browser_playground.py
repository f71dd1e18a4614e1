"""The playground in a real Chromium: turns, policies, what is kept, Markdown, the slider."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.real_server import Server
from tests.server.ui.browser import PHONE, Watched, answered, ask, send, setting, shares

pytestmark = pytest.mark.slow


def test_an_example_streams_and_its_tokens_leave_the_cache(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    page.click("#tab-playground")
    page.click("#examples button >> nth=0")
    assert "Find" in page.input_value("#prompt")
    page.click("#send")
    page.wait_for_selector(".answer .token.some")  # while it streams
    answered(page)
    [(dropped, usage)] = shares(page)
    assert dropped == usage > 0.1
    answer = page.locator(".answer .tokens")
    assert "answer" in answer.inner_text()
    assert answer.locator(".token.some").count() > 50
    assert "released" in page.inner_text("#cache .counts")
    assert "% less memory" in page.inner_text("#cache .share").replace("\n", " ")
    assert "per second" in page.inner_text(".pace")
    page.click("#tab-requests")
    page.wait_for_selector("#events tr >> nth=1")
    assert "due" in page.inner_text("#events")
    watched.check()


def test_an_answer_is_formatted_until_a_token_is_dropped(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    ask(page, "Hello", 40)
    assert page.is_visible(".answer .markdown") and not page.is_visible(".answer .tokens")
    assert page.inner_text("#cache .share").split("\n") == ["…", "not yet compressed"]
    page.click("#new")
    ask(page, "Hello", 300)
    assert page.is_visible(".answer .tokens") and not page.is_visible(".answer .markdown")
    assert "less memory" in page.inner_text("#cache .share")


def test_answers_are_long_enough_for_an_event(
    live: Server, start_server: StartServer, watched: Watched
) -> None:
    page = watched.ready(live.url)
    assert page.input_value("#max-tokens") == "1200"
    page = watched.ready(start_server(FakeEngine(max_model_len=512)).url)
    assert page.input_value("#max-tokens") == "256", "half of the context"


def test_the_slider_shows_what_was_held_after_each_event(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    ask(page, "Hello", 300)
    moments = int(page.get_attribute(".slider input", "max"))
    assert moments > 3
    held, later = [], []
    for moment in range(1, moments + 1):
        page.fill(".slider input", str(moment))
        later.append(page.locator(".tokens .token.later").count())
        held.append(page.locator(".tokens .token.some").count())
    assert later == sorted(later, reverse=True) and later[0] > later[1] > later[-1]
    assert later[-1] == 1, "the newest token is not in the cache"
    assert held[0] == 0 and held == sorted(held) and held[-1] > 100
    assert "At the end" in page.inner_text(".slider output")
    page.fill(".slider input", "2")
    assert "After event 1 of" in page.inner_text(".slider output")
    assert "held" in page.get_attribute(".slider input", "aria-valuetext")
    page.click(".slider button")
    page.wait_for_function("() => document.querySelector('.slider input').value === '4'")
    page.click(".slider button")
    assert page.inner_text(".slider button") == "Play"


GONE = ".tokens .token.gone"  # not those of the legend


def test_remainders_are_shown_as_what_they_stand_for(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    ask(page, "Hello", 300)
    told = page.inner_text(".sums")
    assert "In each of 8 heads one more entry, the remainder, stands for" in told
    assert page.locator(GONE + ".summed").count() == page.locator(GONE).count() > 0
    page.fill(".slider input", "1")
    assert not page.is_visible(".sums"), "nothing is dropped at the start"


def test_two_policies_on_one_prompt(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    setting(page, compare=True)
    ask(page, "Hello", 300)
    (kept, by_usage), (none, nothing) = shares(page)
    assert kept == by_usage > 0.3 and none == nothing == 0
    assert page.locator(".answer .chip").all_inner_texts() == ["kara", "none"]
    marked = page.locator(".answer >> nth=0").locator(".token.differs").count()
    same = "Same answer" in page.inner_text(".verdict")
    assert same == (marked == 0) and ("differ from token" in page.inner_text(".verdict")) != same
    setting(page, compare=False)
    watched.check()


def test_differing_tokens_are_found(start_server: StartServer, watched: Watched) -> None:
    page = watched.ready(start_server().url)
    found = page.evaluate("""async () => {
      const { differences, verdict } = await import("/ui/playground/differences.js");
      const pairs = [["abcde", "abXde"], ["abc", "abc"], ["", "ab"], ["abcd", "bcda"]];
      return pairs.map(([a, b]) => {
        const found = differences([...a], [...b]);
        return [found, verdict(found)];
      });
    }""")
    assert [where for where, _ in found] == [[[2], [2]], [[], []], [[], [0, 1]], [[0], [3]]]
    assert found[0][1] == "The answers differ from token 3 on."
    assert found[1][1] == "Same answer, token for token."


def test_every_policy_that_is_offered_answers(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    listed = live.http.get("/v1/kv/policies").json()["data"]
    setting(page, max_tokens=8)
    options = page.locator(".policy >> nth=0").locator("option[value]:not([value=''])")
    assert {policy["name"] for policy in listed} <= set(
        options.evaluate_all("all => all.map(one => one.value)")
    )
    able = [policy["name"] for policy in listed if policy["refusal"] is None]
    assert {"none", "kara", "snapkv", "rkv"} <= set(able) and "adakv" not in able
    for name in able:
        page.click("#open-settings")
        page.locator(".policy select >> nth=0").select_option(name)
        page.click("#settings button.main")
        send(page, "Hello")
        answered(page)
        assert not page.locator(".answer .error").count(), name
    page.click("#open-settings")
    refused = page.locator(".policy >> nth=0").locator("option[value=adakv]")
    assert refused.is_disabled()
    page.click(".policy summary:has-text('cannot run here') >> nth=0")
    assert "--kv-layout head" in page.inner_text(".policy ul >> nth=0")


def test_the_servers_own_arguments_fill_its_form(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    page.click("#tab-playground")
    assert "kara, window 64, buffer 8" in page.inner_text("#asked-of")
    page.click("#open-settings")
    page.locator(".policy select >> nth=0").select_option("kara")
    assert page.input_value("[name=window] >> nth=0") == "64"
    assert page.input_value("[name=buffer] >> nth=0") == "8"


def test_what_the_server_refuses_is_said(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    page.click("#tab-playground")
    page.click("#open-settings")
    page.locator(".policy select >> nth=0").select_option("snapkv")
    page.click(".policy summary:text-is('Arguments') >> nth=0")
    budget = page.locator("[name=budget] >> nth=0")
    assert page.locator(f"#{budget.get_attribute('aria-describedby')}").inner_text()
    budget.fill("-3")
    page.locator(".policy [name=trigger] >> nth=0").select_option("")
    page.locator(".policy [name=protect_prompt] >> nth=0").select_option("")
    page.click("#settings button.main")
    send(page, "Hello")
    answered(page)
    answer = live.complete(kv_policy={"name": "snapkv", "budget": -3, "query_reduce": "heads"})
    assert page.inner_text(".answer .error") == answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["Enter", "Control+Enter"])
def test_enter_sends_and_shift_enter_does_not(
    start_server: StartServer, watched: Watched, key: str
) -> None:
    page = watched.ready(start_server().url)
    page.click("#tab-playground")
    page.fill("#prompt", "SAY[a]")
    page.press("#prompt", "Shift+Enter")
    page.type("#prompt", "b")
    assert page.input_value("#prompt") == "SAY[a]\nb"
    page.press("#prompt", key)
    answered(page)
    assert page.inner_text(".said") == "SAY[a]\nb" and page.input_value("#prompt") == ""


def test_a_stopped_answer_is_part_of_the_conversation(
    start_server: StartServer, watched: Watched
) -> None:
    server = start_server(allow_kv_trace=True)
    page = watched.ready(server.url)
    setting(page, max_tokens=400)
    send(page, "SLOW")
    page.locator(".answer .tokens").locator(".token >> nth=4").wait_for()
    page.click("#stop")
    answered(page)
    assert "Stopped." in page.inner_text(".answer")
    said = page.inner_text(".answer .tokens")
    send(page, "SAY[so]")
    answered(page)
    assert server.prompts[-1].startswith(f"<user>SLOW<assistant>{said}") and "0 1 2" in said


def test_edit_and_regenerate(start_server: StartServer, watched: Watched) -> None:
    server = start_server()
    page = watched.ready(server.url)
    setting(page, system="be brief")
    for text in ("SAY[one]", "SAY[two]"):
        send(page, text)
        answered(page)
    assert page.locator(".turn").count() == 2, "only the new turn is added"

    def newest() -> str:
        return server.prompts[-1]

    page.click(".turn >> nth=1 >> button:text-is('Regenerate')")
    answered(page)
    two = "<system>be brief<user>SAY[one]<assistant>one<user>SAY[two]<assistant>"
    assert newest() == two and len(server.engine.seen) == 3
    page.click(".turn >> nth=0 >> button:text-is('Edit')")
    assert page.input_value("#prompt") == "SAY[one]"
    send(page, "SAY[three]")
    answered(page)
    assert newest() == "<system>be brief<user>SAY[three]<assistant>"
    assert page.locator(".said").all_inner_texts() == ["SAY[three]"]


def test_conversations_are_kept_in_the_browser(start_server: StartServer, watched: Watched) -> None:
    page = watched.ready(start_server().url)
    page.click("#tab-playground")
    for text in ("SAY[first]", "SAY[second]"):
        page.click("#new")
        send(page, text)
        answered(page)
    titles = page.locator("#conversation option").all_inner_texts()
    assert titles == ["SAY[second]", "SAY[first]"]
    page.reload()
    page.wait_for_selector("body[data-ready]")
    page.select_option("#conversation", label="SAY[first]")
    assert page.inner_text(".answer .markdown").strip() == "first"
    page.click("#open-settings")
    page.click("#delete")
    assert page.locator("#conversation option").all_inner_texts() == ["SAY[second]"]
    assert page.locator(".said").all_inner_texts() == ["SAY[second]"]


LAST_IN_VIEW = """() => {
  const thread = document.getElementById("thread"), view = thread.getBoundingClientRect();
  const { bottom } = [...thread.querySelectorAll(".token")].at(-1).getBoundingClientRect();
  return thread.scrollTop > 200 && view.top < bottom && bottom < view.bottom;
}"""


@pytest.mark.parametrize("size", [PHONE, {"width": 1440, "height": 500}], ids=["phone", "low"])
def test_the_newest_text_stays_in_view(
    live: Server, watched: Watched, size: dict[str, int]
) -> None:
    watched.page.set_viewport_size(size)
    page = watched.ready(live.url)
    setting(page, max_tokens=3500, ignore_eos=True)
    send(page, "Hello")
    page.wait_for_selector(".answer .token >> nth=400")
    page.wait_for_function(LAST_IN_VIEW)
    page.locator("#thread").evaluate("one => { one.scrollTop = 0; }")
    page.wait_for_timeout(500)
    assert page.locator("#thread").evaluate("one => one.scrollTop") == 0, "a reader went back"
    page.click("#stop")
    answered(page)


MARKDOWN = """# Title

A **bold** word, *one* leaning, `code`, a [link](https://example.org/),
[another](javascript:alert(1)).

- one
- two
  1. deep

| a | b |
|---|---|
| 1 | 2 |

```
x < y && <b>
```

> quoted ![picture](https://example.org/p.png) <i>markup</i>
"""


def test_markdown_becomes_elements(live: Server, watched: Watched) -> None:
    page = watched.ready(live.url)
    found: dict[str, Any] = page.evaluate(
        """async (text) => {
      const { Markdown } = await import("/ui/playground/markdown.js");
      const whole = new Markdown(), grown = new Markdown();
      for (let end = 0; end <= text.length; end += 7) grown.write(text.slice(0, end));
      grown.write(text);
      whole.write(text);
      const one = whole.element;
      return {
        same: one.isEqualNode(grown.element),
        tags: [...new Set([...one.querySelectorAll("*")].map((each) => each.tagName))],
        links: [...one.querySelectorAll("a")].map((a) => [a.getAttribute("href"), a.rel]),
        code: one.querySelector("pre").textContent,
        quote: one.querySelector("blockquote").textContent,
      };
    }""",
        MARKDOWN,
    )
    assert found["same"], "a text that grows becomes the same elements"
    wanted = {"H4", "STRONG", "EM", "CODE", "A", "UL", "OL", "LI", "TABLE", "TH", "TD", "PRE"}
    assert wanted | {"BLOCKQUOTE"} <= set(found["tags"])
    assert not {"IMG", "I", "B", "SCRIPT"} & set(found["tags"])
    rel = "noopener noreferrer nofollow"
    picture = ["https://example.org/p.png", rel]
    assert found["links"] == [["https://example.org/", rel], picture]
    assert found["code"] == "x < y && <b>" and "<i>markup</i>" in found["quote"]
    watched.check()


def test_copy(start_server: StartServer, watched: Watched) -> None:
    server = start_server(FakeEngine(max_model_len=4096))
    watched.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = watched.ready(server.url)
    page.click("#tab-playground")
    send(page, "SAY[a *b*]")
    answered(page)
    page.click("#cache button:text-is('Copy')")
    page.wait_for_selector("#cache button:text-is('Copied')")
    assert page.evaluate("() => navigator.clipboard.readText()") == "a *b*"
