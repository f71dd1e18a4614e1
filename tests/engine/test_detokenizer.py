"""Streams of ids to text: split characters, stop strings across tokens, held-back tails."""

from __future__ import annotations

import random

import pytest

from kvserve.engine.frontend.detokenizer import IncrementalDetokenizer, StopStrings
from kvserve.engine.frontend.tokenizer import Tokenizer
from tests.checkpoints import write_byte_fallback_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(write_byte_fallback_tokenizer(tmp_path_factory.mktemp("fallback"))))


Shown = tuple[list[str], IncrementalDetokenizer]


def stream(tokenizer: Tokenizer, text: str, *stops: str, include: bool = False) -> Shown:
    detokenizer = IncrementalDetokenizer(tokenizer, stops, include_stop=include)
    shown = []
    for token in tokenizer.encode(text):
        detokenizer.push(token)
        shown.append(detokenizer.text)
        if detokenizer.stop is not None:
            break
    detokenizer.flush()
    return [*shown, detokenizer.text], detokenizer


@pytest.mark.parametrize("kind", ["tokenizer", "fallback"])
def test_half_characters_are_never_shown(kind: str, request: pytest.FixtureRequest) -> None:
    text = "na\u00efve \u4f60\u597d one\ntwo \U0001f600!"
    shown, _ = stream(request.getfixturevalue(kind), text)
    assert shown[-1] == text
    assert all(text.startswith(part) for part in shown)


def test_an_unfinished_character_is_shown_at_the_end_only(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token in tokenizer.encode("a\U0001f600")[:-1]:
        detokenizer.push(token)
        assert detokenizer.text == "a"
    detokenizer.flush()
    assert detokenizer.text == "a\ufffd"


def test_random_streams_agree_with_plain_search(tokenizer: Tokenizer) -> None:
    """A stop string is cut off, unless it is to be included; of none a beginning is shown; a false
    start is released."""
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(30))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 6))) for _ in range(2)]
        include = rng.random() < 0.5
        shown, detokenizer = stream(tokenizer, text, *stops, include=include)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if not ends:
            assert shown[-1] == text
            continue
        assert detokenizer.stop is not None
        assert len(shown) - 1 == min(ends), "the stop string was noticed late"
        found = shown[-1] + ("" if include else detokenizer.stop)
        assert text.startswith(found) and len(found) == min(ends)
        assert all(text.startswith(part) and len(part) <= len(shown[-1]) for part in shown)


def test_a_byte_that_is_no_character_takes_nothing_back(fallback: Tokenizer) -> None:
    """The decoder's own view of such a stream is "one\ufffd\ufffd two": the newline is gone."""
    names = ["\u2581one", "<0x0A>", "<0xE4>", "\u2581two", "<0xC3>", "<0xAF>", "."]
    vocab = fallback.backend.get_vocab()
    ids = [vocab[name] for name in names]
    detokenizer = IncrementalDetokenizer(fallback)
    shown = []
    for token in ids:
        detokenizer.push(token)
        shown.append(detokenizer.text)
    assert shown[:3] == ["one", "one\n", "one\n"]
    assert shown[3:] == ["one\n\ufffd two"] * 2 + ["one\n\ufffd two\u00ef"] + [
        "one\n\ufffd two\u00ef."
    ]
    detokenizer.push(ids[2])
    detokenizer.flush()
    assert detokenizer.text == shown[-1] + "\ufffd"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["<0x3E>", "<0xA8>"], ">\ufffd"),
        (["<0xA8>", "<0x0A>", "\u2581one"], "\ufffd\n one"),
        (["\u2581one", "<0xF0>", "<0x9F>", "<0x0A>", "<0xC3>", "<0xAF>"], "one\ufffd\n\u00ef"),
        (["<0x0A>", "<0xE4>"], "\n\ufffd"),
        (["<0xE4>", "<0xE4>", "<0xBD>", "<0xA0>", "a"], "\ufffd\u4f60a"),
        (["<0xE4>", "</s>", "<0xBD>", "a"], "\ufffda"),
    ],
)
def test_bytes_beside_one_that_is_no_character_keep_their_text(
    names: list[str], text: str, fallback: Tokenizer
) -> None:
    """As sentencepiece 0.2.3 has it; the decoder of tokenizers 0.23.3 loses the whole row."""
    ids = [fallback.backend.get_vocab()[name] for name in names]
    detokenizer = IncrementalDetokenizer(fallback)
    for token in ids:
        detokenizer.push(token)
    detokenizer.flush()
    assert detokenizer.text == fallback.decode(ids) == text


@pytest.mark.parametrize("kind", ["tokenizer", "fallback"])
@pytest.mark.parametrize("skip", [True, False])
def test_any_tokens_give_growing_text(
    kind: str, skip: bool, request: pytest.FixtureRequest
) -> None:
    """Tokens of a bad model: stray bytes, specials, ids beyond the tokenizer's."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(280) for _ in range(rng.randint(1, 12))]
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        before = ""
        for token in ids:
            detokenizer.push(token)
            assert detokenizer.text.startswith(before)
            assert not detokenizer.text[len(before) :].endswith("\ufffd"), "it may be half of one"
            before = detokenizer.text
        detokenizer.flush()
        assert detokenizer.text.startswith(before)
        assert detokenizer.text == tokenizer.decode(ids, skip)


def test_stop_strings_cost_no_more_the_longer_they_match(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kind: work that grows with what is held back (DOORS 2): two looks a character, and a copy
    for all choices of a request."""
    looks = 0
    begin_with = StopStrings.begin_with

    def counted(self: StopStrings, text: str) -> bool:
        nonlocal looks
        looks += 1
        return begin_with(self, text)

    monkeypatch.setattr(StopStrings, "begin_with", counted)
    word = " remember"
    given = [(word * 120)[:999] + chr(0x4E00 + i) for i in range(128)]
    stops = StopStrings(tokenizer, given, skip_special=True)
    detokenizer = IncrementalDetokenizer(tokenizer, stops)
    text = word * 130
    for token in tokenizer.encode(text, add_special_tokens=False):
        detokenizer.push(token)
    assert looks <= 2 * len(text)
    assert len(detokenizer._held) == 999 and detokenizer.length == len(text)
    for token in tokenizer.encode(chr(0x4E05), add_special_tokens=False):
        detokenizer.push(token)
    assert detokenizer.stop == given[5]


def test_stop_strings_that_hold_one_another(tokenizer: Tokenizer) -> None:
    _, detokenizer = stream(tokenizer, "xabcd", "abcx", "bc", "abcde")
    assert (detokenizer.text, detokenizer.stop) == ("xa", "bc")
    _, detokenizer = stream(tokenizer, "xabcd", "bcd", "abcd")
    assert (detokenizer.text, detokenizer.stop) == ("x", "abcd")


def test_a_special_token_inside_a_stop_string_is_not_shown_alone(tokenizer: Tokenizer) -> None:
    """What stands for it in the text is no character."""
    special, (token_id, _) = next(iter(tokenizer.added_tokens.items()))
    detokenizer = IncrementalDetokenizer(tokenizer, ["x" + special])
    for token in (*tokenizer.encode("y", add_special_tokens=False), token_id):
        detokenizer.push(token)
    assert detokenizer.text == "y" and detokenizer.stop is None
