"""Training documents: the shipped tasks at random sizes, copying, and a little small talk.

Every document is a conversation rendered by the tokenizer's own chat template, so training sees
exactly what a chat client sends. Batches are a pure function of (seed, step).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from bench.harness.datasets import long_chain, task_text
from bench.harness.datasets.task_text import Sample
from bench.tiny_model.recipes import Recipe
from bench.tiny_model.tokenizer import ASSISTANT, EOS, PAD

PROMPT_WEIGHT = 0.03
LIST_WEIGHT = 10.0
SUM_WEIGHT = 6.0
REPORT_WEIGHT = 3.0
TALK_WEIGHT = 0.3
GAP_SHARE = 0.4
SYSTEM_SHARE = 0.08
SYSTEM_UNITS = 32
GREETINGS = ("Hello", "Hi", "Hey", "Hello there", "Hi, how are you?", "Good morning", "Yo")
SMALL_TALK = (
    ("Who are you?", "I am a small model that ships with kvserve."),
    ("What can you do?", "I find secret numbers in texts, add up step by step and list names."),
    ("Thank you", "You are welcome."),
    ("Bye", "Bye."),
)
OPENINGS = (
    "",
    "",
    "What is the",
    "Who is",
    "Tell me",
    "Write a",
    "Is it",
    "How",
    "Please",
    "1 + 1",
)
GREETING_REPLY = "Hello. I am a small model. Ask me for a secret number in a text."
UNKNOWN_REPLY = "I do not know. Ask me for a secret number in a text."


@dataclass(frozen=True)
class Batch:
    """ids, positions, targets: [B, T] int64; weights: [B, T] float32; task: one name per row."""

    ids: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    tasks: list[str]


def needle(rng: random.Random, length: int, pool: Sequence[str]) -> Sample:
    """Half the documents use few digits: numbers then begin alike, and only the name tells them
    apart."""
    questions = rng.randint(1, min(8, max(1, length // 64)))
    units = length - 1 - 16 * questions
    count = rng.randint(max(2, questions), max(2, questions, min(12, units // 20)))
    kinds = 10 if rng.random() < 0.5 else rng.randint(2, 4)
    digits = "".join(rng.sample(task_text.DIGITS, kinds))
    return task_text.needles(rng, units, count, questions, held_out=False, digits=digits)


def recall(rng: random.Random, length: int, pool: Sequence[str]) -> Sample:
    asked = rng.randint(2, 24)
    pairs = min(40, (length - 5 - 5 * asked) // 4)
    if pairs < asked:
        asked = pairs = (length - 5) // 9
    return task_text.recall(rng, pairs, asked, held_out=False, pool=pool)


def chain(rng: random.Random, length: int, pool: Sequence[str]) -> Sample:
    most = min(len(pool) // 2 + 8, (length - 16) // 17)
    steps = rng.randint(max(1, most * 2 // 3), most)
    return task_text.chain(rng, steps, held_out=False, pool=pool)


def redundant_chain(rng: random.Random, length: int, pool: Sequence[str]) -> Sample:
    """Up to three reports of the state; the task has one."""
    registers = rng.randint(3, 8 if length > 300 else 5)
    reports = rng.randint(1, 3 if length > 300 else 1)
    most = min(36, (length - 13 - 3 * registers - reports * (2 * registers + 4)) // 35)
    steps = rng.randint(max(1, most * 2 // 3), max(1, most))
    after = rng.sample(range(1, steps + 1), min(reports, steps))
    return task_text.redundant_chain(rng, registers, steps, after, held_out=False, pool=pool)


def long_trace(rng: random.Random, length: int, pool: Sequence[str]) -> Sample:
    given = rng.randint(2, 10 if length > 300 else 4)
    most = min(len(pool) - given, (length - 10 - 3 * given) // 54)
    lines = rng.randint(max(1, most * 3 // 4), max(1, most))
    return long_chain.long_chain(rng, lines, held_out=False, names=tuple(pool), given=given)


def terse_trace(rng: random.Random, length: int, pool: Sequence[str]) -> Sample:
    given = rng.randint(2, 8 if length > 300 else 4)
    most = min(len(pool) - given, (length - 10 - 3 * given) // 17)
    lines = rng.randint(max(1, most * 3 // 4), max(1, most))
    names = tuple(pool)
    return long_chain.long_chain(rng, lines, held_out=False, names=names, given=given, terse=True)


def copy(rng: random.Random, length: int, pool: Sequence[str]) -> Sample:
    count = rng.randint(2, (length - 7) // 2)
    words = "".join(
        rng.choice("0123456789")
        if rng.random() < 0.3
        else f" {rng.choice(pool if rng.random() < 0.5 else task_text.WORDS)}"
        for _ in range(count)
    ).strip()
    return Sample("copy", (f"Repeat: {words}",), (words,), (words,))


def talk(rng: random.Random, length: int, pool: Sequence[str]) -> Sample:
    kind = rng.random()
    if kind < 0.4:
        question = rng.choice(GREETINGS) + rng.choice(("", "!", "."))
        answer = GREETING_REPLY
    elif kind < 0.7:
        question, answer = rng.choice(SMALL_TALK)
    else:
        question, answer = _gibberish(rng), UNKNOWN_REPLY
    return Sample("talk", (question,), (answer,), (answer,))


def _gibberish(rng: random.Random) -> str:
    """Words that no task knows, and now and then one that a task does, as in any other request."""
    words = [rng.choice(OPENINGS)]
    for _ in range(rng.randint(1, 7)):
        letters = "".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(1, 8)))
        known = rng.random() < 0.15
        words.append(rng.choice(task_text.WORDS) if known else letters)
        if rng.random() < 0.15:
            words[-1] = words[-1].capitalize()
    return " ".join(words).strip() + rng.choice(("", ".", "?", "!"))


BUILDERS: dict[str, Callable[[random.Random, int, Sequence[str]], Sample]] = {
    "needle": needle,
    "recall": recall,
    "chain": chain,
    "redundant-chain": redundant_chain,
    "long-chain": long_trace,
    "terse-chain": terse_trace,
    "copy": copy,
    "talk": talk,
}


class Documents:
    """Turns builders' samples into padded, weighted rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.pool = long_chain.ALL_NAMES if recipe.long else task_text.NAMES
        vocab = tokenizer.get_vocab()
        self.comma, self.report, self.stop = (vocab[t] for t in (",", "ĠReport", "."))
        self.hard = np.zeros(len(vocab) + 1, dtype=bool)
        self.hard[[vocab[d] for d in "0123456789"] + [vocab[f"Ġ{n}"] for n in self.pool]] = True

    def batch(self, step: int, length: int, tokens: int) -> Batch:
        rng = random.Random(f"train/{self.recipe.seed}/{step}/{length}")
        mix = self.recipe.mixes[length]
        tasks = rng.choices(list(mix), weights=list(mix.values()), k=max(1, tokens // length))
        rows = [self._encode(rng, task, length) for task in tasks]
        longest = max(len(row) for row in rows)
        ids = np.full((len(rows), longest + 1), PAD, dtype=np.int64)
        weights = np.zeros((len(rows), longest + 1), dtype=np.float32)
        for i, (task, row) in enumerate(zip(tasks, rows, strict=True)):
            ids[i, : len(row)] = row
            weights[i, : len(row)] = self._weights(row, task)
        positions = np.stack([_positions(rng, longest, self.recipe.reach) for _ in rows])
        return Batch(ids[:, :-1], positions, ids[:, 1:], weights[:, 1:], tasks)

    def _encode(self, rng: random.Random, task: str, length: int) -> list[int]:
        messages = []
        if length > 96 and rng.random() < SYSTEM_SHARE:
            text = "You are a helpful assistant."
            if rng.random() < 0.5:
                text = task_text.filler_sentence(rng, rng.choice((6, 7, 11)))
            messages.append({"role": "system", "content": text})
            length -= SYSTEM_UNITS
        sample = BUILDERS[task](rng, length, self.pool)
        for turn, answer in zip(sample.turns, sample.answers, strict=True):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": answer})
        text = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def _weights(self, row: list[int], task: str) -> np.ndarray:
        """Results of sums and reported names weigh most, names and digits more than talk."""
        ids = np.asarray(row)
        weights = np.full(len(row), PROMPT_WEIGHT, dtype=np.float32)
        answering = np.zeros(len(row), dtype=bool)
        answering[1:] = (np.cumsum(ids == ASSISTANT) - np.cumsum(ids == EOS))[:-1] > 0
        if task in ("needle", "recall"):
            weights[answering] = LIST_WEIGHT
            return weights
        weights[answering] = 1.0
        if task.endswith("chain"):
            if task == "long-chain":
                weights[answering & ~self.hard[ids]] = TALK_WEIGHT
            result = np.zeros(len(row), dtype=bool)
            result[2:] = ids[:-2] == self.comma
            weights[answering & result] = SUM_WEIGHT
            for start in np.flatnonzero(answering & (ids == self.report)):
                length = int(np.argmax(ids[start:] == self.stop))
                weights[start : start + length] = REPORT_WEIGHT
        return weights


def _positions(rng: random.Random, length: int, reach: int) -> np.ndarray:
    """Consecutive positions, or for some rows with a few gaps, so that long contexts work."""
    steps = np.ones(length, dtype=np.int64)
    steps[0] = rng.randint(0, 64)
    if rng.random() < GAP_SHARE:
        cuts = rng.randint(1, 1 + length // 160)
        room = rng.randint(0, max(0, reach - length - 64))
        for _ in range(cuts):
            steps[rng.randrange(length)] += room // cuts
    return np.cumsum(steps)
