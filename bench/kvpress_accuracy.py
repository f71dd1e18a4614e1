"""Accuracy of kvpress beside our policies: the same prompts, the same counts of entries kept.

    python -m bench.peers.install kvpress      # once
    python -m bench.kvpress_accuracy --save-result bench/results/DATE-kvpress-accuracy.json

Both answer the shipped tasks greedily in float32. Definitions differ in places (what counts as the
window, when the first event of a decoding press comes), so answers need not be equal; the share of
equal answers stands beside the scores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from bench.peers.peer import PEERS, PeerProcess
from kvserve.benchmarks.datasets.workload import TaskPrompts, task_prompts
from kvserve.benchmarks.measuring.benchmark import Benchmark, run_benchmark
from kvserve.benchmarks.measuring.measure import accuracy, play
from kvserve.benchmarks.reports.report import Column, Report, Row
from kvserve.benchmarks.setup.checkpoint import Checkpoint
from kvserve.benchmarks.setup.options import add_engine_arguments, add_report_arguments, at_least
from kvserve.benchmarks.setup.policy_spec import PolicySpec

_EVERY = 32  # decode steps between events of the policies that compress while decoding


@dataclass(frozen=True)
class Pair:
    """One method on both sides; ``decodes``: it compresses while decoding, not the prompt."""

    policy: str
    fields: dict[str, Any]
    press: dict[str, Any]
    decodes: bool = False

    def spec(self, keep: int) -> PolicySpec:
        when: dict[str, Any] = {}
        if self.decodes:
            when = {"trigger": "threshold", "threshold": keep + _EVERY, "protect_prompt": False}
        return PolicySpec(self.policy, {"budget": keep, **self.fields, **when})


_SNAPKV = {"name": "SnapKVPress", "window_size": 32, "kernel_size": 5}
_CHUNKS = {"name": "ChunkKVPress", "base": "SnapKVPress", "chunk_length": 10}
_PREFILL = (
    Pair("snapkv", {}, _SNAPKV),
    Pair("chunkkv", {}, _CHUNKS | {"window_size": 8, "kernel_size": 1}),
    Pair("keydiff", {}, {"name": "KeyDiffPress"}),
    Pair("streaming_llm", {}, {"name": "StreamingLLMPress", "n_sink": 4}),
)
_DECODE = (
    Pair("snapkv", {"window": 16}, _SNAPKV | {"window_size": 16}, decodes=True),
    Pair("keydiff", {}, {"name": "KeyDiffPress"}, decodes=True),
)
PAIRS = {"needle-512": _PREFILL, "needle-1024": _PREFILL, "chain": _DECODE}
_DEFAULT_TASKS = ["needle-512", "chain"]
COLUMNS = (
    Column("task", "task", left=True),
    Column("method", "method", left=True),
    Column("entries kept", "keep", ",d"),
    Column("exact match", "exact_match", ".3f"),
    Column("95% interval", "interval_95", lambda bounds: "{:.3f}–{:.3f}".format(*bounds)),
    Column("correct prefix", "correct_prefix", ".3f"),
    Column("held at end", "held", ",.1f"),
    Column("kvpress", "kvpress_exact_match", ".3f"),
    Column("95% interval", "kvpress_interval_95", lambda bounds: "{:.3f}–{:.3f}".format(*bounds)),
    Column("correct prefix", "kvpress_correct_prefix", ".3f"),
    Column("held at end", "kvpress_held", ",.1f"),
    Column("same answers", "same_answers", ".0%"),
    Column("n", "n", "d"),
    Column("seed", "seed", "d"),
)


class KvpressAccuracy(Benchmark):
    """Every method at every count on every task, on both sides."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        super().__init__(args, checkpoint, policies)
        self._tokenizer = checkpoint.tokenizer()
        self._versions: dict[str, str] = {}
        self._rows: list[Row] = []

    def measure(self) -> None:
        args = self.args
        process = PeerProcess.of(PEERS["kvpress"])
        try:
            self._versions = process.load(model=str(self.checkpoint.path), dtype="float32")
            for task in args.tasks:
                workload = task_prompts(task, args.num_samples, self._tokenizer, args.seed)
                cases = [(pair, keep) for pair in PAIRS[task] for keep in self._counts(pair)]
                for pair, keep in cases:
                    self._rows.append(self._row(process, task, workload, pair, keep))
        finally:
            process.close()

    def report(self) -> Report:
        packages = ", ".join(f"{name} {version}" for name, version in self._versions.items())
        about = [f"{self.checkpoint.name}, greedy, float32; interval: Wilson's", packages]
        settings = self.settings("tasks", "num_samples", "keep", "keep_decoding")
        settings["versions"] = self._versions
        program = "python -m bench.kvpress_accuracy"
        return Report("kvpress_accuracy", about, COLUMNS, self._rows, settings, program=program)

    def _counts(self, pair: Pair) -> list[int]:
        counts: list[int] = self.args.keep_decoding if pair.decodes else self.args.keep
        return counts

    def _row(
        self, process: PeerProcess, task: str, workload: TaskPrompts, pair: Pair, keep: int
    ) -> Row:
        spec = pair.spec(keep)
        ours = play(self.engines.build(spec), workload)
        shown = f"{task} {spec.label}"
        theirs, held = self._pressed(process, workload, pair, keep, shown)
        right = accuracy(workload, theirs)
        spec_of_model = self.checkpoint.spec
        lanes = spec_of_model.num_layers * spec_of_model.num_kv_heads
        pairs_of_answers = zip(ours.answers, theirs, strict=True)
        return {
            "task": task,
            "method": pair.policy + (", while decoding" if pair.decodes else ""),
            "policy": spec.label,
            "press": pair.press,
            "keep": keep,
            "seed": self.args.seed,
            **accuracy(workload, ours.answers),
            "held": ours.figures["held_entries_at_end"] / lanes,
            "kvpress_exact_match": right["exact_match"],
            "kvpress_interval_95": right["interval_95"],
            "kvpress_correct_prefix": right["correct_prefix"],
            "kvpress_held": held,
            "same_answers": sum(a == b for a, b in pairs_of_answers) / len(theirs),
        }

    def _pressed(
        self, process: PeerProcess, workload: TaskPrompts, pair: Pair, keep: int, title: str
    ) -> tuple[list[list[str]], float]:
        """Answers per conversation, each turn computed from its whole prompt; mean entries held at
        the end."""
        every = _EVERY if pair.decodes else None
        stop = list(self.checkpoint.spec.eos_token_ids)
        answers: list[list[str]] = [[] for _ in range(len(workload))]
        held = 0.0
        silent = True if self.args.disable_tqdm else None
        for index in tqdm(range(len(workload)), desc=title, unit="request", disable=silent):
            limit = workload.max_tokens(index)
            result: dict[str, Any] = {}
            while (prompt := workload.prompt(index, answers[index])) is not None:
                result = process.run(
                    prompts=[prompt],
                    max_tokens=limit,
                    stop=stop,
                    press=pair.press,
                    keep=keep,
                    every=every,
                )
                answers[index].append(self._tokenizer.decode(result["tokens"][0]))
            held += result["held"][0]
        return answers, held / len(workload)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_engine_arguments(parser)
    add_report_arguments(parser)
    words = f"some of {', '.join(PAIRS)} (default: {' '.join(_DEFAULT_TASKS)})"
    parser.add_argument(
        "--tasks", nargs="+", choices=PAIRS, default=_DEFAULT_TASKS, metavar="TASK", help=words
    )
    count = at_least(1)
    words = "samples per task (default: 50)"
    parser.add_argument("--num-samples", type=count, default=50, metavar="N", help=words)
    words = "entries kept of a prompt (default: 64 128 256)"
    parser.add_argument(
        "--keep", nargs="+", type=at_least(48), default=[64, 128, 256], metavar="N", help=words
    )
    words = "entries kept while decoding (default: 420)"
    parser.add_argument(
        "--keep-decoding", nargs="+", type=at_least(48), default=[420], metavar="N", help=words
    )
    parser.add_argument("--max-num-seqs", type=count, default=32, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    missing = PEERS["kvpress"].missing
    if missing:
        parser.error(missing)
    return run_benchmark(KvpressAccuracy, args, [])


if __name__ == "__main__":
    raise SystemExit(main())
