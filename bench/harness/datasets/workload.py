"""What is sent to an engine: prompts of token ids, or the shipped tasks played turn by turn."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness.datasets.task_text import Sample
from bench.harness.datasets.tasks import TASKS, Grade, grade, make_samples
from kvserve.engine.frontend.tokenizer import Tokenizer

Message = dict[str, str]
DEFAULT_BLOCK_SIZE = 16


class Workload(ABC):
    """Conversations; a plain prompt is a conversation of one turn."""

    ignore_eos: bool
    score_name: str = ""
    """The name of the grades' ``score`` in tables."""
    arrivals: Sequence[float] = ()
    """Seconds at which conversations begin; empty if a request rate sets the times."""
    by_ids: bool = False
    """Whether ``prompt`` gets answers as token ids, not as texts."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def max_tokens(self, index: int) -> int:
        """The most tokens of each answer of a conversation."""

    @abstractmethod
    def prompt(self, index: int, answers: Sequence[Any]) -> list[int] | None:
        """The next prompt of a conversation after the engine's answers, or ``None`` at its end."""

    def pause(self, index: int, turn: int) -> float:
        """Seconds before a turn's prompt is sent."""
        return 0.0

    @abstractmethod
    def full_lengths(self) -> list[int]:
        """Per conversation, cached tokens when it ends as expected."""

    def messages(self, index: int, answers: Sequence[str]) -> list[Message]:
        """The same prompt as a chat; token ids that were drawn have none."""
        raise NotImplementedError

    def grades(self, answers: Sequence[Sequence[str]]) -> list[Grade] | None:
        """One grade per conversation, or ``None`` where no answer is right or wrong."""
        return None


@dataclass(frozen=True)
class Prompts(Workload):
    """Prompts of token ids, each with its output limit; with ``ignore_eos`` outputs are that long.

    ``texts``: those of the prompts; random ids have none.
    """

    prompts: Sequence[list[int]]
    limits: Sequence[int]
    ignore_eos: bool
    texts: Sequence[str] = ()
    arrivals: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.prompts)

    def max_tokens(self, index: int) -> int:
        return self.limits[index]

    def prompt(self, index: int, answers: Sequence[str]) -> list[int] | None:
        return None if answers else self.prompts[index]

    def messages(self, index: int, answers: Sequence[str]) -> list[Message]:
        return [{"role": "user", "content": self.texts[index]}]

    def full_lengths(self) -> list[int]:
        return list(map(_cached, map(len, self.prompts), self.limits))


@dataclass(frozen=True)
class Conversations(Workload):
    """Of random token ids, with pauses. Later prompts repeat the answers as token ids too, not as
    text, so that each prompt begins with exactly the tokens of the turn before.

    ``asked[i]`` are the new tokens of each of conversation i's prompts, ``thinks[i]`` the seconds
    before them.
    """

    asked: Sequence[Sequence[list[int]]]
    thinks: Sequence[Sequence[float]]
    limit: int
    ignore_eos: bool
    by_ids = True

    def __len__(self) -> int:
        return len(self.asked)

    def max_tokens(self, index: int) -> int:
        return self.limit

    def prompt(self, index: int, answers: Sequence[Sequence[int]]) -> list[int] | None:
        asked = self.asked[index]
        if len(answers) == len(asked):
            return None
        said = [
            token for new, answer in zip(asked, answers, strict=False) for token in (*new, *answer)
        ]
        return said + asked[len(answers)]

    def pause(self, index: int, turn: int) -> float:
        return self.thinks[index][turn]

    def full_lengths(self) -> list[int]:
        return [sum(map(len, asked)) + len(asked) * self.limit - 1 for asked in self.asked]


@dataclass(frozen=True)
class TaskPrompts(Workload):
    """Samples of a task. Each turn is a chat request that contains the engine's earlier answers.

    ``score_name``: the name of the grades' ``score``; ``note``: what a reader of the results has to
    know; ``longest``: tokens of a first prompt and its answer together.
    """

    samples: Sequence[Sample]
    tokenizer: Tokenizer
    limit: int
    grader: Callable[[Sample, Sequence[str]], Grade]
    score_name: str = "correct_prefix"
    note: str = ""
    longest: int | None = None
    ignore_eos = False

    def __len__(self) -> int:
        return len(self.samples)

    def max_tokens(self, index: int) -> int:
        if self.longest is None:
            return self.limit
        room = self.longest - len(self.prompt(index, []) or [])
        return max(1, min(self.limit, room))

    def prompt(self, index: int, answers: Sequence[str]) -> list[int] | None:
        if len(answers) == len(self.samples[index].turns):
            return None
        return self.tokenizer.apply_chat_template(self.messages(index, answers))

    def messages(self, index: int, answers: Sequence[str]) -> list[Message]:
        turns = self.samples[index].turns
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=False):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": turn})
        return messages

    def full_lengths(self) -> list[int]:
        lengths = []
        for index, sample in enumerate(self.samples):
            last = self.prompt(index, sample.answers[:-1])
            assert last is not None
            answer = self.tokenizer.encode(sample.answers[-1], add_special_tokens=False)
            lengths.append(_cached(len(last), len(answer) + 1))  # and an end of sequence
        return lengths

    def grades(self, answers: Sequence[Sequence[str]]) -> list[Grade]:
        return list(map(self.grader, self.samples, answers))


@dataclass(frozen=True)
class Source:
    """What a dataset is made of: how many prompts, from which seed, and its own flags."""

    count: int
    seed: int
    vocab_size: int
    tokenizer: Any
    """A ``Tokenizer`` where the dataset needs one."""
    path: Any
    """A ``Path`` where the dataset is a file."""
    ignore_eos: bool
    options: Mapping[str, Any]

    def __getitem__(self, option: str) -> Any:
        return self.options[option]


def lognormal_lengths(
    rng: np.random.Generator, count: int, mean: float, sigma: float, cap: int
) -> NDArray[np.int32]:
    """``count`` lengths of a log-normal distribution, cut to ``[1, cap]``; sigma 0 is constant."""
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn.round(), 1, cap).astype(np.int32)


def random_prompts(
    lengths: Sequence[tuple[int, int]], vocab_size: int, seed: int, ignore_eos: bool = True
) -> Prompts:
    """One prompt of random ids for each pair of prompt and output length."""
    rng = random.Random(f"random/{seed}")
    prompts = [rng.choices(range(vocab_size), k=length) for length, _ in lengths]
    return Prompts(prompts, [limit for _, limit in lengths], ignore_eos)


def task_prompts(task: str, count: int, tokenizer: Tokenizer, seed: int) -> TaskPrompts:
    samples = make_samples(task, count, seed)
    return TaskPrompts(samples, tokenizer, TASKS[task].max_new_tokens, grade)


def blocks_at_once(workload: Workload, block_size: int) -> int:
    """The demand: blocks of all conversations together, each at its full length, uncompressed."""
    return sum(-(-length // block_size) for length in workload.full_lengths())


def _cached(prompt: int, output: int) -> int:
    """Cached tokens at the end: the last token sampled is never stored."""
    return prompt + output - 1
