"""Synthetic agent conversations: one system prompt, a question, tool outputs, and think time.

Prompts are token ids. Later prompts repeat the answers as token ids too, not as text, so that each
prompt begins with exactly the tokens of the turn before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.benchmarks.datasets.workload import Message, Source, Workload
from kvserve.log import ConfigError


@dataclass(frozen=True)
class Conversations(Workload):
    """``asked[i]`` are the new tokens of each of conversation i's prompts, ``thinks[i]`` the
    seconds before them."""

    asked: Sequence[Sequence[list[int]]]
    thinks: Sequence[Sequence[float]]
    limit: int
    ignore_eos: bool

    def __len__(self) -> int:
        return len(self.asked)

    def max_tokens(self, index: int) -> int:
        return self.limit

    def prompt(self, index: int, answers: Sequence[str]) -> list[int] | None:
        raise AssertionError("its answers are token ids")

    def prompt_after(self, index: int, answers: Sequence[Sequence[int]]) -> list[int] | None:
        """The next prompt after answers of these tokens, or ``None`` at the end."""
        asked = self.asked[index]
        if len(answers) == len(asked):
            return None
        said = [
            token for new, answer in zip(asked, answers, strict=False) for token in (*new, *answer)
        ]
        return said + asked[len(answers)]

    def messages(self, index: int, answers: Sequence[str]) -> list[Message]:
        raise ConfigError("--backend openai-chat: --dataset conversations is token ids")

    def full_lengths(self) -> list[int]:
        return [sum(map(len, asked)) + len(asked) * self.limit - 1 for asked in self.asked]


def conversations(source: Source) -> Conversations:
    """``--num-prompts`` conversations, all with the same system prompt."""
    rng = random.Random(f"conversations/{source.seed}")
    vocab, fewest, most = range(source.vocab_size), source["min_turns"], source["max_turns"]
    shortest, longest = source["min_tool_len"], source["max_tool_len"]
    for least, greatest, flags in (
        (fewest, most, "--min-turns and --max-turns"),
        (shortest, longest, "--min-tool-len and --max-tool-len"),
    ):
        if least > greatest:
            raise ConfigError(f"{flags}: the first must not exceed the second")
    system = rng.choices(vocab, k=source["system_len"])
    asked, thinks = [], []
    for _ in range(source.count):
        turns = rng.randint(fewest, most)
        lengths = [
            source["question_len"],
            *(rng.randint(shortest, longest) for _ in range(turns - 1)),
        ]
        new = [rng.choices(vocab, k=length) for length in lengths]
        asked.append([system + new[0], *new[1:]])
        mean = source["think_seconds"]
        thinks.append([0.0, *(rng.expovariate(1 / mean) if mean else 0.0 for _ in new[1:])])
    return Conversations(asked, thinks, source["answer_len"], source.ignore_eos)
