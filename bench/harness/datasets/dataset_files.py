"""Prompts from files: ShareGPT conversations, lines of prompts, timed traces, questions."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bench.harness.datasets.workload import Prompts, Source
from kvserve.log import ConfigError

# Conversations outside these lengths are skipped, as in vLLM, so that figures are comparable.
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


def sharegpt(source: Source) -> Prompts:
    """First turns of conversations in random order; outputs are as long as the second turns."""
    tokenizer, output_len = source.tokenizer, source["sharegpt_output_len"]
    conversations = _read_json(source.path)
    random.Random(f"sharegpt/{source.seed}").shuffle(conversations)
    texts: list[str] = []
    prompts, limits = [], []
    for conversation in conversations:
        if len(texts) == source.count:
            break
        turns = [turn["value"] for turn in conversation.get("conversations", ())[:2]]
        if len(turns) < 2:
            continue
        prompt = tokenizer.encode(turns[0])
        limit = output_len or len(tokenizer.encode(turns[1], add_special_tokens=False))
        if min(len(prompt), limit) < _SHORTEST or len(prompt) > _LONGEST_PROMPT:
            continue
        if len(prompt) + limit <= _LONGEST:
            texts.append(turns[0])
            prompts.append(prompt)
            limits.append(limit)
    _check_count(source, len(texts))
    return Prompts(prompts, limits, source.ignore_eos, texts=texts)


def custom(source: Source) -> Prompts:
    """Lines ``{"prompt": ..., "output_tokens": ...}`` in the file's order; the latter is optional.

    Each prompt is a user turn under the chat template, if the tokenizer has one.
    """
    lines, tokenizer = _read_lines(source, "prompt"), source.tokenizer
    texts = [str(line["prompt"]) for line in lines]
    if source["skip_chat_template"] or not tokenizer.has_chat_template:
        prompts = [tokenizer.encode(text) for text in texts]
    else:
        chats = [[{"role": "user", "content": text}] for text in texts]
        prompts = [tokenizer.apply_chat_template(chat) for chat in chats]
    limits = [int(line.get("output_tokens") or source["custom_output_len"]) for line in lines]
    return Prompts(prompts, limits, source.ignore_eos, texts=texts)


def timed_trace(source: Source) -> Prompts:
    """Lines ``{"timestamp", "input_length", "output_length", "hash_ids"}``, as in Mooncake traces.

    Prompts are random ids, one chunk of tokens per hash, so that equal hashes give equal tokens.
    Tokens beyond the hashes belong to the line alone.
    """
    lines = _read_lines(source, "timestamp", "input_length", "output_length")
    lines.sort(key=lambda line: float(line["timestamp"]))
    times = [float(line["timestamp"]) * source["timed_trace_sec_multiplier"] for line in lines]
    vocab, chunk = range(source.vocab_size), source["timed_trace_chunk_hash_size"]
    prompts = []
    for index, line in enumerate(lines):
        length, tokens = int(line["input_length"]), []
        for name in line.get("hash_ids", ()):
            tokens += random.Random(f"hash/{name}").choices(vocab, k=chunk)
        own = max(0, length - len(tokens))
        tokens += random.Random(f"line/{source.seed}/{index}").choices(vocab, k=own)
        prompts.append(tokens[:length])
    return Prompts(
        prompts,
        [int(line["output_length"]) for line in lines],
        source.ignore_eos,
        arrivals=[time - times[0] for time in times],
    )


# ---- questions with right answers --------------------------------------------------------------

_Read = TypeVar("_Read")


def read_questions(
    name: str,
    path: Path,
    count: int,
    read: Callable[[Mapping[str, Any]], _Read],
    flag: str = "--benchmark",
) -> list[_Read]:
    """What ``read`` makes of the first ``count`` lines of a file, or of all of a shorter one."""
    found = []
    for number, line in _lines(path, count, flag):
        try:
            found.append(read(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{flag}: {path}: line {number} is not of format {name} ({error!r})"
            ) from None
    if not found:
        raise ConfigError(f"{flag}: {path} is empty")
    return found


# ---- reading ----------------------------------------------------------------------------------


def _read_json(path: Path) -> list[dict[str, Any]]:
    text = _text(path, "--dataset-path")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--dataset-path: {path} is not JSON: {error}") from None
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise ConfigError(f"--dataset-path: {path} does not hold a list of conversations")
    return content


def _read_lines(source: Source, *needed: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    path = source.path
    for number, line in _lines(path, source.count, "--dataset-path"):
        try:
            content = dict(json.loads(line))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--dataset-path: {path}: line {number}: {error}") from None
        missing = [name for name in needed if name not in content]
        if missing:
            raise ConfigError(f"--dataset-path: {path}: line {number} has no {missing[0]!r}")
        lines.append(content)
    _check_count(source, len(lines))
    return lines


def _lines(path: Path, count: int, flag: str) -> Iterable[tuple[int, str]]:
    """The first ``count`` lines that are not empty, numbered from 1."""
    filled = filter(str.strip, _text(path, flag).split("\n"))
    return enumerate(itertools.islice(filled, count), start=1)


def _text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from None


def _check_count(source: Source, found: int) -> None:
    if found < source.count:
        raise ConfigError(
            f"--num-prompts: {source.path} has {found} that can be used, not {source.count}"
        )
