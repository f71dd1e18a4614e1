"""Turns ids into text as they come, without half characters and possible parts of stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from kvserve.engine.frontend.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one choice. ``text`` is what may be shown; ``stop`` the stop string that ended it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self.text = ""
        self.stop: str | None = None
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        self._include_stop = include_stop
        self._skip_special = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held = ""
        self._ids: list[int] = []  # those whose text has not come out of the stream

    def push(self, token_id: int) -> None:
        """Take in one token; sets ``stop`` when it completes a stop string."""
        self._ids.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # tokenizers has no type for it
            # With byte fallback, a byte that makes no character also makes the bytes before it
            # invalid for the decoder. These have been shown, so go on behind them.
            piece = self._behind()
            self._stream = DecodeStream(self._ids, self._skip_special)
        if piece:
            self._ids.clear()
            self._append(piece)

    def flush(self) -> None:
        """At the end, show what was held back, unfinished characters included."""
        if self.stop is None:
            self.text += self._held + self._behind()
            self._held = ""

    def _behind(self) -> str:
        return self._tokenizer.decode(self._ids, self._skip_special)

    def _append(self, piece: str) -> None:
        tail = self._held + piece
        # A stop string starts in what is held or in the new piece: earlier text was cleared of it.
        found = [(tail.find(stop), stop) for stop in self._stops if stop in tail]
        if found:
            at, self.stop = min(found)
            self.text += tail[: at + (len(self.stop) if self._include_stop else 0)]
            self._held = ""
            return
        keep = self._longest_opening(tail)
        self.text += tail[: len(tail) - keep]
        self._held = tail[len(tail) - keep :]

    def _longest_opening(self, tail: str) -> int:
        """Length of the longest end of ``tail`` that begins a stop string."""
        lengths = (
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(tail)), 0, -1)
            if tail.endswith(stop[:size])
        )
        return max(lengths, default=0)
