"""How far a policy's next-token distributions are from the full cache's, on any text.

A text is forced through the engine under each policy: its tokens are computed in chunks, as those
of a preempted sequence are, with the policy's events at the positions where decoding has them. So a
few thousand tokens take as long as a prompt, and need no reference answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvserve.engine.cache.entry_store import score_bytes
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.engine.messages import NewSequence
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.window_group import WindowGroup

FloatArray = NDArray[np.float64]
LogProbs = dict[int, Tensor]
"""By text: what the full cache says of each token after the prompt, float32 [n, V]."""


@dataclass(frozen=True)
class ForcedText:
    """``token_ids`` of which the first ``num_prompt`` are a prompt and the others forced.

    ``facts`` are places of tokens that repeat something said before: found, if each of these tokens
    is the likeliest one. The last ``num_asking`` tokens ask for them, and belong to no text.
    """

    name: str
    token_ids: IntArray
    num_prompt: int
    num_asking: int = 0
    facts: tuple[range, ...] = ()

    @property
    def num_text(self) -> int:
        """Forced tokens of the text itself."""
        return len(self.token_ids) - self.num_prompt - self.num_asking

    @property
    def later(self) -> slice:
        """The second half of them, where events have begun."""
        return slice(self.num_text // 2, self.num_text)


@dataclass
class Fidelity:
    """What a policy makes of one text; arrays have an element for each forced token."""

    nll: Tensor
    """Negative log-likelihood of the text's tokens, in nats."""
    kl: Tensor
    """KL divergence of the full cache's distribution to the policy's, in nats."""
    same: Tensor
    """Whether both have the same likeliest token."""
    right: Tensor
    """Whether the likeliest token is the text's."""
    held: FloatArray
    """Bytes held when each token is predicted."""
    events: int = 0

    def facts_found(self, text: ForcedText) -> list[bool]:
        """Whether each of the text's facts is found."""
        first = text.num_prompt
        return [
            bool(self.right[span.start - first : span.stop - first].all()) for span in text.facts
        ]

    def mean_bytes(self, text: ForcedText) -> float:
        """Bytes held, averaged over the text's second half."""
        return float(self.held[text.later].mean())

    def bytes_at_end(self, text: ForcedText) -> float:
        """Bytes held when the text's last token is computed."""
        return float(self.held[text.num_text - 1])


def fidelity(engine: LLMEngine, texts: Sequence[ForcedText], full: LogProbs) -> list[Fidelity]:
    """The figures of the engine's policy on ``texts``; ``full`` is what the full cache says.

    If it is empty, the engine's policy is the full cache, and what it says is kept there.
    """
    parts: dict[int, list[tuple[Tensor, ...]]] = {i: [] for i in range(len(texts))}
    fill = not full

    def compare(index: int, at: int, logits: Tensor) -> None:
        mine, text = logits.log_softmax(dim=-1).cpu(), texts[index]
        there = slice(at, at + len(mine))
        if fill and index not in full:
            full[index] = torch.empty(len(text.token_ids) - text.num_prompt, mine.shape[1])
        if fill:
            full[index][there] = mine
        first = text.num_prompt + at
        ids = torch.from_numpy(text.token_ids[first : first + len(mine)].astype(np.int64))
        theirs, likeliest = full[index][there], mine.argmax(dim=-1)
        nll = -mine.gather(1, ids[:, None])[:, 0]
        kl = (theirs.exp() * (theirs - mine)).sum(dim=-1)
        parts[index].append((nll, kl, likeliest == theirs.argmax(dim=-1), likeliest == ids))

    held = _force(engine, texts, compare)
    figures = []
    for i, found in parts.items():
        nll, kl, same, right = map(torch.cat, zip(*found, strict=True))
        figures.append(Fidelity(nll, kl, same, right, *held[i]))
    return figures


def bytes_held(engine: LLMEngine, texts: Sequence[ForcedText]) -> list[float]:
    """Bytes that each text holds under the engine's policy, averaged over its second half."""
    held = _force(engine, texts, lambda index, at, logits: None)
    return [float(held[i][0][text.later].mean()) for i, text in enumerate(texts)]


def _force(
    engine: LLMEngine, texts: Sequence[ForcedText], on_scored: Callable[[int, int, Tensor], None]
) -> dict[int, tuple[FloatArray, int]]:
    """Compute ``texts``; ``on_scored`` gets each one's number, where among its forced tokens it is,
    and logits. Returns the bytes that each held by token, and its events."""
    core = engine.core
    meter = _BytesMeter(engine)
    held: dict[int, list[FloatArray]] = {i: [] for i in range(len(texts))}
    events: dict[int, int] = {}

    def scored(seq_id: int, start: int, logits: Tensor) -> None:
        skipped = max(0, texts[seq_id].num_prompt - start)
        if skipped < len(logits):
            before = np.arange(start + skipped, start + len(logits))
            held[seq_id].append(meter.bytes_held(seq_id, before))
            on_scored(seq_id, start + skipped - texts[seq_id].num_prompt, logits[skipped:])

    core.runner.on_scored = scored
    try:
        for number, text in enumerate(texts):
            ids, answered = text.token_ids.tolist(), len(text.token_ids) - text.num_prompt
            core.add(
                NewSequence(number, text.name, ids, 1, [], prompt_logprobs=0, num_answered=answered)
            )
        while core.has_work:
            outputs = core.step()
            for refused in outputs.refused:
                raise RuntimeError(f"{texts[refused.seq_id].name}: {refused.message}")
            events |= {ended.seq_id: ended.details.compactions for ended in outputs.finished}
    finally:
        core.runner.on_scored = None
    return {i: (np.concatenate(held[i]), events[i]) for i in range(len(texts))}


class _BytesMeter:
    """Says what sequences hold while a chunk of theirs is scored."""

    def __init__(self, engine: LLMEngine) -> None:
        core = engine.core
        self._scheduler, self._sequences = core.scheduler, core._sequences
        blocks, layout = core.scheduler.blocks, core.scheduler.layout
        self._block_bytes = self._sequences.block_bytes
        self._of_entry = self._block_bytes * layout.groups / layout.block_size
        self._of_query = self._block_bytes * layout.groups / blocks.log.block_tokens
        kept = core.runner.policies[0].demands.kept_scores
        self._scores = score_bytes(layout, kept)
        self._windows = [group for group in blocks.groups if isinstance(group, WindowGroup)]

    def bytes_held(self, number: int, before: IntArray) -> FloatArray:
        """Bytes that a text holds where ``before [n]`` of its tokens are computed, as decoding
        computes them: one by one, so that nothing is held for the rest of a chunk. Bytes of blocks
        are those of the entries in them: a partial block counts as a part."""
        blocks, rows = self._scheduler.blocks, self._scheduler.rows
        [seq] = self._sequences.of_ids([number])
        row, computed = seq.row, int(rows.num_computed[seq.row])
        entries = float(blocks.kv_lens[:, row].sum()) / blocks.layout.groups
        log = blocks.queries
        queries = np.maximum(before - int(log.logged_from([row])[0]), 0) // int(log._stride[row])
        held = (entries - (computed - before)) * self._of_entry + queries * self._of_query
        for group in self._windows:
            of_token = self._block_bytes * group.tables[0].num_lanes / group.block_tokens
            held += group.held_behind(before) * of_token
        kinds = blocks.held_by_kind(slice(row, row + 1))
        for kind in {"entries", "log", *(group.kind for group in self._windows)}:
            kinds.pop(kind, None)
        left = bool(rows.leaves_remainder[row]) * self._sequences.remainder_bytes
        return np.asarray(held + kinds.total() * self._block_bytes + left + self._scores)


# ---- texts -----------------------------------------------------------------------------------

CITIES = (
    *("Lima", "Oslo", "Cairo", "Quito", "Delhi", "Paris", "Tokyo", "Accra", "Minsk", "Hanoi"),
    *("Rabat", "Sofia", "Dakar", "Seoul", "Tunis", "Vaduz"),
)


def pieces(tokens: IntArray, count: int, length: int, *, trial: bool = False) -> Iterator[IntArray]:
    """``count`` stretches of ``length`` tokens, spread over a text; for a ``trial`` one more, the
    last, from between the first two."""
    last = len(tokens) - length
    if last < 0:
        raise ValueError(f"the text has {len(tokens)} tokens, {length} are needed")
    starts = np.linspace(0, last, count).astype(int).tolist()
    for start in starts + [last // (2 * max(count - 1, 1))] * trial:
        yield tokens[start : start + length]


def with_facts(
    name: str,
    tokens: IntArray,
    num_prompt: int,
    count: int,
    encode: Callable[[str], list[int]],
    rng: np.random.Generator,
) -> ForcedText:
    """A text into which ``count`` sentences are planted that its end asks for."""
    cities = rng.choice(len(CITIES), count, replace=False)
    codes = rng.integers(10_000, 100_000, count)
    said = [
        encode(f" The secret code of {CITIES[c]} is {n}. ")
        for c, n in zip(cities, codes, strict=True)
    ]
    asked = [
        (encode(f"\nThe secret code of {CITIES[c]} is"), encode(f" {n}"))
        for c, n in zip(cities, codes, strict=True)
    ]
    rest = len(tokens) - num_prompt
    places = num_prompt + (np.arange(count) + 0.5) * rest / (count + 1)
    parts: list[int] = []
    last = 0
    for place, sentence in zip(places.astype(int).tolist(), said, strict=True):
        parts += [*tokens[last:place].tolist(), *sentence]
        last = place
    parts += tokens[last:].tolist()
    num_asking, facts = -len(parts), []
    for question, answer in asked:
        parts += question
        facts.append(range(len(parts), len(parts) + len(answer)))
        parts += [*answer, *encode(".")]
    num_asking += len(parts)
    return ForcedText(name, np.array(parts, np.int32), num_prompt, num_asking, tuple(facts))
