"""Turns ids into text as they come, without half characters and possible parts of stop strings."""

from __future__ import annotations

import re
from bisect import bisect_left
from codecs import getincrementaldecoder
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from kvserve.engine.frontend.tokenizer import Tokenizer

_SURROGATES = range(0xD800, 0xE000)
"""Characters that no decoded text has: they stand for tokens that are left out of the text."""
_LEFT_OUT = re.compile("[\ud800-\udfff]")


class StopStrings:
    """The stop strings of one request, for all its choices.

    They may have special tokens in them, also those that the text leaves out (``hidden``).
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, skip_special: bool) -> None:
        hidden = [
            (text, token_id)
            for text, (token_id, special) in tokenizer.added_tokens.items()
            if skip_special and special and any(text in stop for stop in stops)
        ]
        self.hidden = {i: chr(code) for (_, i), code in zip(hidden, _SURROGATES, strict=False)}
        marked = {}
        for stop in stops:
            found = stop
            for text, token_id in hidden:
                found = found.replace(text, self.hidden.get(token_id, text))
            marked[found] = stop
        self._given = marked
        self._sorted = sorted(marked)
        self._all = tuple(marked)
        self.firsts = {stop[0] for stop in marked}
        """The characters that they begin with."""

    def begin_with(self, text: str) -> bool:
        at = bisect_left(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)

    def at_end_of(self, text: str) -> tuple[str, int] | None:
        """The longest one that the text ends with, and its length there."""
        if not text.endswith(self._all):
            return None
        found = max((stop for stop in self._all if text.endswith(stop)), key=len)
        return self._given[found], len(found)


class IncrementalDetokenizer:
    """Text of one choice. ``text`` is what may be shown; ``stop`` the stop string that ended it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: StopStrings | Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self.text = ""
        self.stop: str | None = None
        self._tokenizer = tokenizer
        if not isinstance(stop_strings, StopStrings):
            stop_strings = StopStrings(tokenizer, stop_strings, skip_special=skip_special_tokens)
        self._stops = stop_strings
        self._include_stop = include_stop
        self._skip_special = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held = ""
        self._ids: list[int] = []  # those whose text has not come out of the stream
        self._bytes = b""  # what they stand for, if they are bytes
        self._lost = ""  # the text of bytes that make no character, until more text comes

    def push(self, token_id: int) -> None:
        """Take in one token; sets ``stop`` when it completes a stop string."""
        byte = self._tokenizer.fallback_bytes.get(token_id)
        if byte is not None:
            self._bytes = self._continued(byte)
        self._ids.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # tokenizers has no type for it
            # With byte fallback, a byte that makes no character also makes the bytes before it
            # invalid for the decoder. These have been shown, so go on behind them.
            piece = self._behind()
            self._stream = DecodeStream(self._ids, self._skip_special)
        if piece and byte is None and self._bytes:  # an unfinished character is none
            piece = self._behind()
        if piece:
            piece, self._lost = self._lost + piece, ""
            self._ids.clear()
            self._bytes = b""
        if token_id in self._stops.hidden:
            piece = (piece or "") + self._stops.hidden[token_id]
        if not piece:
            return
        if not self._held and self._stops.firsts.isdisjoint(piece):
            self.text += self._visible(piece) if self._stops.hidden else piece
        else:
            self._append(piece)

    @property
    def length(self) -> int:
        """Characters of the text so far, those that are held back included."""
        return len(self.text) + len(self._visible(self._held))

    def flush(self) -> None:
        """At the end, show what was held back, unfinished characters included."""
        if self.stop is None:
            self.text += self._visible(self._held) + self._lost + self._behind()
            self._held = self._lost = ""

    def _behind(self) -> str:
        return self._tokenizer.decode(self._ids, self._skip_special)

    def _continued(self, byte: int) -> bytes:
        """The bytes of an unfinished character with one more. If that can be none, those before it
        are lost and the stream begins anew: it would lose what follows them, too."""
        held = self._bytes + bytes([byte])
        try:
            getincrementaldecoder("utf-8")().decode(held)
        except UnicodeDecodeError:
            if not self._bytes:
                return held
            self._lost += self._behind()
            self._ids.clear()
            self._stream = DecodeStream([self._tokenizer.plain_token], self._skip_special)
            return bytes([byte])
        return held

    def _append(self, piece: str) -> None:
        """Add text in which a stop string may be. What is held back is its longest end that begins
        one.

        Each character is added once and dropped once, so the work does not grow with what is held.
        """
        tail, start = self._held + piece, 0
        for end in range(len(self._held) + 1, len(tail) + 1):
            while start < end and not self._stops.begin_with(tail[start:end]):
                start += 1
            found = self._stops.at_end_of(tail[start:end])
            if found is not None:
                self.stop, length = found
                self.text += self._visible(tail[: end - length])
                self.text += self.stop if self._include_stop else ""
                self._held = ""
                return
        self.text += self._visible(tail[:start])
        self._held = tail[start:]

    def _visible(self, text: str) -> str:
        return _LEFT_OUT.sub("", text) if self._stops.hidden else text
