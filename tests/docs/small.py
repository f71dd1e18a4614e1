"""A command of a page made small: the same flags, few prompts, files in a folder of the test."""

from __future__ import annotations

from pathlib import Path

# What replaces a flag's values, where the command has that flag; a flag never given is not added.
_VALUES = {
    "--num-prompts": ["1"],
    "--num-samples": ["1"],
    "--repeat": ["1"],
    "--pool-share": ["4"],
    "--pool-shares": ["4"],
    "--max-num-seqs": ["1"],
    "--output-len": ["40"],
    "--input-len": ["32"],
    "--prefix-repetition-num-prefixes": ["1"],
    "--prefix-repetition-output-len": ["8"],
    "--num-iters": ["1"],
    "--num-iters-warmup": ["0"],
    "--max-new-tokens": ["40"],
}
_FILES = ("--save-result", "--save-markdown", "--save-plots")
_LEFT_OUT = ("--minutes",)
_ADDED = {"bench throughput": ["--num-warmups", "0", "--disable-tqdm"], "eval": ["--disable-tqdm"]}
_ONCE = ("--policy",)
"""Flags of which a measurement has dozens, one setting each."""


def small(name: str, argv: list[str], folder: Path) -> list[str]:
    """``argv`` of command ``name`` with fewer of everything that takes time."""
    words: list[str] = []
    policies: dict[str, list[str]] = {}
    for flag, values in _flags(argv):
        if flag in _LEFT_OUT:
            continue
        if flag in _ONCE:
            policies.setdefault(values[0].partition(":")[0], [flag, *values])
        elif flag in _FILES:
            words += [flag, str(folder / Path(values[0]).name)]
        else:
            words += [flag, *_VALUES.get(flag, values)]
    return [*words, *(word for spec in policies.values() for word in spec), *_ADDED.get(name, [])]


def _flags(argv: list[str]) -> list[tuple[str, list[str]]]:
    """Flags with their values, in order; what comes first may be no flag."""
    found: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") or not found:
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return found
