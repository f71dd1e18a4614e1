"""Finds continuations by their tokens, in a time that hardly grows with how many there are.

A continuation stands under the exact tokens before its floor: the hash of the full columns, then
the tail. Those that share these are sorted by all their tokens, so the one that has most in common
with a prompt is next to where the prompt would stand.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.continuation import (
    EVICTED,
    NEW,
    POLICY,
    TOKENS,
    Continuation,
    Resumption,
)

_LOOKED_AT = 8
"""Continuations of other answers to a prompt that are asked whether they explain a miss."""
_FLOOR, _PROMPT = "floor", "prompt"
_Listed = list[tuple[bytes, Continuation]]
_Bucket = dict[tuple[Hashable, bool], _Listed]
"""Continuations that begin with the same tokens, sorted by all of theirs: of each policy, those
that are here and those that were evicted."""
_by_text = itemgetter(0)


class LookedUp(NamedTuple):
    """The longest continuation that a prompt begins with, and the cause if none is here."""

    live: Resumption | None
    cause: str


class ContinuationIndex:
    """No two continuations in it have the same tokens, policy, salt and floor."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._buckets: dict[tuple[str, bytes, bytes], _Bucket] = {}
        """By the tokens before the floor; and by those of the last prompt, where that ends before.
        Of the tokens the key has the hash of the full columns, and the tail."""
        self._columns = Counter[tuple[str, bytes]]()
        """How many continuations stand under each hash, whatever their tails."""

    def __iter__(self) -> Iterator[Continuation]:
        for (kind, *_), bucket in self._buckets.items():
            for listed in bucket.values() if kind is _FLOOR else ():
                yield from (known for _, known in listed)

    def add(self, known: Continuation, *, here: bool) -> None:
        """List ``known`` as one that can be resumed, or that was evicted."""
        text = _text(known.token_ids)
        for kind, key, tail in self._places(known, text):
            self._columns[kind, key] += 1
            bucket = self._buckets.setdefault((kind, key, tail), {})
            insort(bucket.setdefault((known.shared_by, here), []), (text, known), key=_by_text)

    def remove(self, known: Continuation, *, here: bool) -> None:
        """Unlist ``known``, which was added with the same ``here``."""
        text = _text(known.token_ids)
        for place in self._places(known, text):
            bucket, policy = self._buckets[place], (known.shared_by, here)
            at = bisect_left(bucket[policy], text, key=_by_text)
            while bucket[policy][at][1] is not known:  # one with another floor has the same text
                at += 1
            del bucket[policy][at]
            if not bucket[policy]:
                del bucket[policy]
            if not bucket:
                del self._buckets[place]
            self._columns[place[:2]] -= 1
            if not self._columns[place[:2]]:
                del self._columns[place[:2]]

    def same(self, new: Continuation) -> Continuation | None:
        """The listed continuation with the tokens, the policy and the floor of ``new``."""
        text = _text(new.token_ids)
        bucket = self._buckets.get(next(self._places(new, text)), {})
        near = [_near(bucket, (new.shared_by, here), text) for here in (True, False)]
        return next((known for same, known in chain(*near) if same == text), None)

    def longest(self, token_ids: IntArray, keys: list[bytes], shared_by: Hashable) -> LookedUp:
        """The continuation that has most in common with ``token_ids``, or why there is none.

        ``keys`` are the seed and the column hashes of ``token_ids``."""
        text, usable = _text(token_ids), len(token_ids) - 1
        live: Resumption | None = None
        gone = other = False
        for length, bucket in self._beginning(_FLOOR, text, keys):
            if length > usable:
                continue
            other = other or any(policy != shared_by for policy, _ in bucket)
            gone = gone or (shared_by, False) in bucket
            for _, known in _near(bucket, (shared_by, True), text):
                shared = min(common(known.token_ids, token_ids), usable)
                if live is None or shared > live.num_tokens:
                    live = Resumption(known, shared)
        if gone or other:
            return LookedUp(live, EVICTED if gone else POLICY)
        answered = live is None and self._answered(token_ids, text, keys)
        return LookedUp(live, TOKENS if answered else NEW)

    def _answered(self, token_ids: IntArray, text: bytes, keys: list[bytes]) -> bool:
        """Whether a prompt of a continuation begins ``token_ids``, which then go another way."""
        return any(
            common(known.token_ids, token_ids) < len(token_ids)
            for _, bucket in self._beginning(_PROMPT, text, keys)
            for listed in bucket.values()
            for _, known in islice(listed, _LOOKED_AT)
        )

    def _places(self, known: Continuation, text: bytes) -> Iterator[tuple[str, bytes, bytes]]:
        """Where ``known`` is listed, whose tokens are ``text``."""
        places = [(_FLOOR, known.floor_key, known.floor)]
        if known.num_prompt < known.floor:
            places.append((_PROMPT, known.prompt_key, known.num_prompt))
        for kind, key, end in places:
            yield kind, key, text[4 * (end // self._size * self._size) : 4 * end]

    def _beginning(
        self, kind: str, text: bytes, keys: list[bytes]
    ) -> Iterator[tuple[int, _Bucket]]:
        """The buckets whose tokens begin ``text``, and how many tokens that are."""
        for column, key in enumerate(keys):
            if (kind, key) in self._columns:
                first = column * self._size
                for end in range(first, min(first + self._size, len(text) // 4 + 1)):
                    bucket = self._buckets.get((kind, key, text[4 * first : 4 * end]))
                    if bucket is not None:
                        yield end, bucket


def _near(bucket: _Bucket, policy: tuple[Hashable, bool], text: bytes) -> _Listed:
    """Those before and behind ``text``: one of them begins with most of it."""
    listed = bucket.get(policy, [])
    place = bisect_left(listed, text, key=_by_text)
    return listed[max(place - 1, 0) : place + 1]


def _text(token_ids: IntArray) -> bytes:
    """Token ids as bytes of the same order, four each."""
    return token_ids.astype(">i4").tobytes()


def common(a: IntArray, b: IntArray) -> int:
    """Length of the common prefix of two token sequences."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count
