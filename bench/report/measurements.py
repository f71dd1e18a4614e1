"""What stands behind docs/benchmarks.md: the measurements, each with its newest result.

A result names the command that made it, so the command is not written here again: `python -m
bench.suite run NAME` runs it once more. A new measurement is a result in bench/results, called
DATE-NAME.json, and an entry below.
"""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.reports.report import Column, columns

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PLOTS = ROOT / "bench" / "results", ROOT / "docs" / "plots"
_OF_ONE_RUN = {"--save-result": 1, "--save-plots": 1, "--minutes": 1, "--disable-tqdm": 0}


@dataclass(frozen=True)
class Measurement:
    """A section of a chapter: what a reader has to know about its figures.

    ``minutes``: its time on one idle core. ``plots``: it draws. ``equal_bytes``: methods are also
    compared at the same bytes held.
    """

    name: str
    title: str
    text: str
    minutes: float
    plots: bool = False
    equal_bytes: bool = False

    def newest(self) -> dict[str, Any]:
        """The latest complete result; files are named DATE-NAME.json."""
        found = sorted(RESULTS.glob(f"????-??-??-{self.name}.json"))
        documents = [json.loads(path.read_text()) for path in found]
        newest: dict[str, Any] = [each for each in documents if each["complete"]][-1]
        return newest

    @property
    def words(self) -> list[str]:
        """The command line, without the flags for results: ``kvserve ...`` or ``python -m ...``."""
        words, kept = iter(shlex.split(self.newest()["command"])), []
        for word in words:
            if word in _OF_ONE_RUN:
                for _ in range(_OF_ONE_RUN[word]):
                    next(words)
            else:
                kept.append(word)
        if "needle-grid" in kept:  # was a task of `kvserve eval` until 2026-11-26
            kept[:2] = ["python", "-m", "bench.needles"]
        return kept

    def table(self, keys: Sequence[str]) -> tuple[Column, ...]:
        """The columns of these keys."""
        if self.words[0] == "kvserve":
            return columns(*keys)
        own = {column.key: column for column in importlib.import_module(self.words[2]).COLUMNS}
        return tuple(own[key] for key in keys)


@dataclass(frozen=True)
class Chapter:
    """A page under docs/benchmarks; ``about``: what it shows, in a sentence or two."""

    slug: str
    title: str
    about: str
    measurements: tuple[Measurement, ...]


LONG = (
    Measurement(
        "equal-bytes-turns",
        "Long traces, graded, at equal bytes",
        "100 chains of 44 lines, whose traces have 2,000 tokens of sums, checks, recaps and talk, "
        "on the model that is trained for them, in turns on a pool of a quarter. Each policy has "
        "the budget that holds as many bytes per sequence as Kara's default, on average over a "
        "run. Its form (trigger, prompt protected or not, remainder or not) is the best of those "
        "tried on seed 11 (bench/results/2026-11-24-equal-bytes-forms.json).",
        36,
        plots=True,
    ),
    Measurement(
        "graded-peers",
        "The same prompts on vLLM's CPU build",
        "48 of them, as many bytes for keys and values, as computed (float32) and in fewer "
        "bits, one thread on the same core, in turns. Every "
        "answer is as long as the right one, so that all engines do the same work.",
        10,
    ),
    Measurement(
        "remainders-3000",
        "Answers of 3,000 tokens",
        "Log-normal lengths, as reasoning models answer. Everybody's pool has as many bytes; what "
        "a sequence takes of it is the mean over the run, logged queries and remainders included.",
        14,
    ),
    Measurement(
        "remainders-uniform",
        "Answers of exactly 3,000 tokens",
        "Without the few very long answers of the log-normal ones, which run alone at the end.",
        12,
    ),
    Measurement(
        "remainders-k8v4",
        "Answers of 3,000 tokens, with entries in fewer bits",
        "The log-normal answers again: every pool has as many bytes, whatever an entry is held in.",
        10,
    ),
    Measurement(
        "remainders-12000",
        "Answers of 12,000 tokens",
        "One run. Tests took 40 of the 239 seconds of `none`, which may be too slow by a tenth.",
        14,
    ),
)
SHORT = (
    Measurement(
        "quarter-pool",
        "A pool of a quarter of the demand",
        "Short traces, which gain little: 100 chains of 30 sums want four times the blocks that "
        "there are. Ratios are medians over turns, each beside the first row of the same turn.",
        3,
    ),
    Measurement(
        "ample-pool",
        "A pool with room for everybody",
        "Memory is not short here: compression saves only attention, and its events cost time.",
        1.5,
    ),
    Measurement(
        "shared-prefixes",
        "Shared prompts, prefix caching off and on",
        "100 prompts of 576 tokens, of which 512 are one of five; caching stays on under Kara.",
        1.5,
    ),
)
ACCURACY = (
    Measurement(
        "chain-accuracy",
        "Accuracy against retention, reasoning step by step",
        "Every policy that compresses while decoding, on chains of 30 sums: a prompt of about 191 "
        "tokens, a trace of 334. All but Kara hold the prompt's count and 20 to 60 % of the "
        "trace's (up to 32 entries more between events); Kara keeps as much of each full window: "
        "its default, the default it had before (group means, the largest over the window, "
        "Token2Chunk) and the paper's preset. StreamingLLM and H2O cannot leave the prompt alone, "
        "and count it in.",
        20,
        plots=True,
        equal_bytes=True,
    ),
    Measurement(
        "kara-ablations",
        "What Kara is made of",
        "The two ablations of the Kara paper's Table 1 at its retention of 40 %: only the "
        "buffer's queries score, and no Token2Chunk (`chunk_budget=0`). First with our scores of "
        "that day, then with the paper's (all heads' queries computed again, attention summed).",
        3,
    ),
    Measurement(
        "needles",
        "Needles by depth and length",
        "One secret number among eight, at five depths of texts of 256 to 2,048 tokens, as in "
        "ChunkKV's tables; policies cut the prompt, question included, to so many entries before "
        "the answer.",
        4,
        plots=True,
    ),
    Measurement(
        "needles-codes",
        "Needles under SpindleKV",
        "The same grid; a ratio of the prompt's entries is left by eviction. SpindleKV then holds "
        "them as codes, PyramidKV as they are: columns say at how many bytes.",
        4,
    ),
)
FEWER_BITS = (
    Measurement(
        "kv-cache-accuracy",
        "Accuracy against bytes, the cache held in fewer bits",
        "The full cache and Kara, each with its entries held as they are computed (float32), as "
        "`int8`, as `k8v4` and as `fp8`. Bytes of entries count scales.",
        35,
        plots=True,
    ),
    Measurement(
        "kv-cache-needles",
        "Needles by depth and length, the cache held in fewer bits",
        "",
        5,
    ),
    Measurement(
        "kv-cache-dtypes",
        "Decoding over a cache of fewer bits",
        "What a decoding step gains where nothing is evicted: the same random entries, held as "
        "float32, as bfloat16 and, under the bfloat16 model, as levels. Scheduler and prompts are "
        "not in it.",
        8,
    ),
    Measurement(
        "cpu-attention",
        "How fast attention reads blocks",
        "Decode attention alone on one core, over blocks in random order; a sum of the same blocks "
        "in the same order, the fastest such read that was found; and a plain sum over the same "
        "memory from end to end.",
        8,
    ),
)
_TOGETHER = "64 + 64 tokens on random weights, one thread on the same core, in turns."
ENGINES = (
    Measurement(
        "cpu-peers-short", "Other engines on the same CPU, in bfloat16", _TOGETHER, minutes=6
    ),
    Measurement(
        "cpu-peers-half-billion",
        "Other engines on a model of half a billion weights",
        f"The dimensions of Qwen2.5-0.5B. {_TOGETHER}",
        6,
    ),
    Measurement(
        "cpu-peers-half-billion-long",
        "The same, with contexts of 2,000 tokens",
        "Prompts of 2,000 tokens, whose computation is most of the time, and answers of 64.",
        10,
    ),
    Measurement(
        "cpu-peers-long",
        "vLLM's CPU build on the same long answers",
        "As many bytes for keys and values, the same prompts and lengths, in turns.",
        12,
    ),
    Measurement(
        "cpu-peers-ngram-copy",
        "The same guesses in vLLM, on a copy",
        "Both engines with the same n-gram settings (5 guesses, lookups of 5 to 2 tokens), and "
        "without, in turns. The weights walk along a cycle of tokens at the cost of random ones, "
        "so each engine answers with a copy of its prompt.",
        3,
    ),
    Measurement(
        "cpu-peers-ngram-edit",
        "The same guesses in vLLM, on an edited text",
        "The same; the prompt has a tenth of its tokens changed, and the answer does not.",
        3,
    ),
)
CONVERSATIONS = (
    Measurement(
        "conversations",
        "Conversations that go on from their compressed cache",
        "Agents on one server after the other, each with a quarter of the blocks that 8 of them "
        "want at their end: tool outputs of 200 to 2,000 tokens, 8 to 20 turns, two seconds to "
        "think. Without continuations a later prompt has the whole history, which Kara protects.",
        65,
    ),
    Measurement(
        "conversations-swap",
        "Conversations with host memory for all of them",
        "The same pool, and 1 GiB of host memory instead of as much as the pool: a continuation "
        "that leaves the pool is still there when its next turn comes.",
        6,
    ),
)
CHAPTERS = (
    Chapter("long-answers", "Long answers", "What compression is for.", LONG),
    Chapter("short-answers", "Short answers", "Where it gains little.", SHORT),
    Chapter("accuracy", "Accuracy", "Right answers against what is kept.", ACCURACY),
    Chapter("fewer-bits", "Fewer bits per entry", "Alone and beside a policy.", FEWER_BITS),
    Chapter("other-engines", "Other engines", "On the same core.", ENGINES),
    Chapter("conversations", "Conversations", "Agents of many turns.", CONVERSATIONS),
)
SUITE = tuple(each for chapter in CHAPTERS for each in chapter.measurements)
