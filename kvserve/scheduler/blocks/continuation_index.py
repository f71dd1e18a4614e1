"""Finds continuations by their tokens, in a time that hardly grows with how many there are.

A continuation stands under the exact tokens before its floor: the hash of the full columns, then
the tail. Those that share these are sorted by all their tokens, so the one that has most in common
with a prompt is next to where the prompt would stand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.continuation import (
    EVICTED,
    NEW,
    POLICY,
    TOKENS,
    Continuation,
    Place,
    Resumption,
)

_LOOKED_AT = 8
"""Continuations of other answers to a prompt that are asked whether they explain a miss."""


class _Sorted:
    """Continuations by their tokens."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.items: list[Continuation] = []

    def add(self, text: bytes, known: Continuation) -> None:
        place = bisect_left(self.texts, text)
        self.texts.insert(place, text)
        self.items.insert(place, known)

    def remove(self, text: bytes) -> None:
        place = bisect_left(self.texts, text)
        del self.texts[place], self.items[place]

    def near(self, text: bytes) -> list[Continuation]:
        """Those before and behind ``text``: one of them begins with most of it."""
        place = bisect_left(self.texts, text)
        return self.items[max(place - 1, 0) : place + 1]


class _Bucket:
    """Continuations with the same first ``length`` tokens, by policy and whether they are here."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.lists: dict[tuple[Hashable, bool], _Sorted] = {}

    def has_other(self, shared_by: Hashable) -> bool:
        return any(policy != shared_by for policy, _ in self.lists)


class _Tails(NamedTuple):
    """The buckets behind a column before which ``start`` tokens stand, by their tails' lengths."""

    start: int
    by_length: dict[int, dict[bytes, _Bucket]]


class LookedUp(NamedTuple):
    """What a prompt begins with: the longest continuation that is here, the longest of those that
    were evicted, and the cause if none is here."""

    live: Resumption | None
    gone: Resumption | None
    cause: str


class ContinuationIndex:
    """No two continuations in it have the same tokens, policy and salt."""

    def __init__(self) -> None:
        self._floors: dict[bytes, _Tails] = {}
        self._prompts: dict[bytes, _Tails] = {}
        """Those whose floor is behind their last prompt, under the tokens of that prompt."""

    def __iter__(self) -> Iterator[Continuation]:
        for tails in self._floors.values():
            for buckets in tails.by_length.values():
                for bucket in buckets.values():
                    for found in bucket.lists.values():
                        yield from found.items

    def add(self, known: Continuation, *, here: bool) -> None:
        """List ``known`` as one that can be resumed, or that was evicted."""
        for index, place, length in self._places(known):
            tails = index.setdefault(place.key, _Tails(place.start, {}))
            tail = _text(known.token_ids[place.start : length])
            buckets = tails.by_length.setdefault(length - place.start, {})
            bucket = buckets.setdefault(tail, _Bucket(length))
            key = known.shared_by, here
            bucket.lists.setdefault(key, _Sorted()).add(_text(known.token_ids), known)

    def remove(self, known: Continuation, *, here: bool) -> None:
        """Unlist ``known``, which was added with the same ``here``."""
        for index, place, length in self._places(known):
            tails = index[place.key]
            tail = _text(known.token_ids[place.start : length])
            buckets = tails.by_length[length - place.start]
            bucket, key = buckets[tail], (known.shared_by, here)
            bucket.lists[key].remove(_text(known.token_ids))
            if not bucket.lists[key].items:
                del bucket.lists[key]
            if not bucket.lists:
                del buckets[tail]
            if not buckets:
                del tails.by_length[length - place.start]
            if not tails.by_length:
                del index[place.key]

    def same(self, new: Continuation) -> Continuation | None:
        """The listed continuation with the tokens and the policy of ``new``."""
        text = _text(new.token_ids)
        for bucket in _buckets(self._floors, text, [new.floor_place.key]):
            for (shared_by, _), found in bucket.lists.items():
                for known in found.near(text) if shared_by == new.shared_by else ():
                    if np.array_equal(known.token_ids, new.token_ids):
                        return known
        return None

    def longest(self, token_ids: IntArray, keys: Iterable[bytes], shared_by: Hashable) -> LookedUp:
        """The continuation that has most in common with ``token_ids``, or why there is none.

        ``keys`` are the seed and the column hashes of ``token_ids``."""
        text, usable = _text(token_ids), len(token_ids) - 1
        best: dict[bool, Resumption | None] = {True: None, False: None}
        other = False
        keys = list(keys)
        for bucket in _buckets(self._floors, text, keys):
            if bucket.length > usable:
                continue
            other = other or bucket.has_other(shared_by)
            for here, most in best.items():
                listed = bucket.lists.get((shared_by, here))
                for known in listed.near(text) if listed is not None else ():
                    shared = min(common(known.token_ids, token_ids), usable)
                    if most is None or shared > most.num_tokens:
                        best[here] = most = Resumption(known, shared)
        live, gone = best[True], best[False]
        if gone is not None or other:
            return LookedUp(live, gone, EVICTED if gone is not None else POLICY)
        answered = live is None and self._answered(token_ids, keys)
        return LookedUp(live, None, TOKENS if answered else NEW)

    def _answered(self, token_ids: IntArray, keys: list[bytes]) -> bool:
        """Whether a prompt of a continuation begins ``token_ids``, which then go another way."""
        text = _text(token_ids)
        for bucket in _buckets(self._prompts, text, keys):
            for found in bucket.lists.values():
                for known in islice(found.items, _LOOKED_AT):
                    if common(known.token_ids, token_ids) < len(token_ids):
                        return True
        return False

    def _places(self, known: Continuation) -> Iterator[tuple[dict[bytes, _Tails], Place, int]]:
        """Where ``known`` is listed: index, place, and how many tokens its bucket shares."""
        yield self._floors, known.floor_place, known.floor
        if known.num_prompt < known.floor:
            yield self._prompts, known.prompt_place, known.num_prompt


def _buckets(index: dict[bytes, _Tails], text: bytes, keys: Iterable[bytes]) -> Iterator[_Bucket]:
    """The buckets whose tokens begin ``text``."""
    for key in keys:
        tails = index.get(key)
        if tails is None:
            continue
        for length, buckets in tails.by_length.items():
            bucket = buckets.get(text[4 * tails.start : 4 * (tails.start + length)])
            if bucket is not None:
                yield bucket


def _text(token_ids: IntArray) -> bytes:
    """Token ids as bytes of the same order, four each."""
    return token_ids.astype(">i4").tobytes()


def common(a: IntArray, b: IntArray) -> int:
    """Length of the common prefix of two token sequences."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count
