"""Lines that tokenizers disagree about: prose, code, digits, emoji, Chinese, control characters."""

from __future__ import annotations

import argparse
import inspect
import random
from pydoc_data import topics

_PIECES = (
    *("hello", " world", "  ", "   ", "\t", "\n", "\r\n", "\n\n\n", " \n ", "don't", "I'LL", "x's"),
    *("7", "42", "1234567", "3.14159", "0x1F", "1,000,000"),
    *("\u00bd", "\u0661\u0662", "\u00b2\u00b3"),
    *("\U0001f600", "\U0001f469\u200d\U0001f680", "\u2764\ufe0f", "\U0001f1e9\U0001f1ea"),
    *("\u4f60\u597d", "\u4e16\u754c\uff01", "\u3053\u3093"),
    *("\ud55c\uad6d", "\u0645\u0631", "\u00e9t\u00e9"),
    *("\x00", "\x07", "\x1b[0m", "\x7f", "\u200b", "\ufeff", "\u00a0", "\u2028", "\U0010ffff"),
    *("_", "->", "!=", "...", "(a[i]"),
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<bos>", "\u2581"),
)


def lines(count: int) -> list[str]:
    """A third each of English prose, Python code, and what is put together at random."""
    prose = [line for page in topics.topics.values() for line in page.splitlines() if line.strip()]
    code = inspect.getsource(argparse).splitlines()
    chance, third = random.Random(0), count // 3
    mixed = ["".join(chance.choices(_PIECES, k=chance.randint(1, 12))) for _ in range(third)]
    return [*chance.sample(prose, third), *chance.sample(code, third), *mixed, "", " ", "  a"]
