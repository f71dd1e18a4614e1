"""What guesses give among many sequences: CPU time of two engines, without and with them.

    python -m bench.guess_turns --model kvserve/tiny --task chain --num-prompts 64 --max-num-seqs 64
    python -m bench.guess_turns --model kvserve/tiny-long --task long-chain-1000 --num-prompts 32
    python -m bench.guess_turns --steps-between 41
    python -m bench.guess_turns --waiting

Both are in one process and take turns of a tenth of a second, on one thread, so that what disturbs
the machine disturbs both. Answers have to be the same, token for token, but for requests that had
an event before its time because blocks ran out.

Sequences that begin together have their events together, in few steps. Guesses part them, and each
step with events costs something whatever their number. ``--steps-between`` parts them beforehand,
as traffic does. ``--waiting`` compares engines without guesses whose events wait for others, or
do not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from math import ceil
from statistics import median
from typing import Any

import torch

from kvserve import LLM, SamplingParams
from kvserve.benchmarks.datasets.tasks import TASKS
from kvserve.benchmarks.datasets.workload import Workload, blocks_at_once, task_prompts
from kvserve.benchmarks.setup.options import at_least, number

_NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
_BLOCK = 16


class Side:
    """One engine over the workload; ``seconds`` of this thread's CPU time."""

    def __init__(self, args: argparse.Namespace, workload: Workload, config: Any) -> None:
        self.engine = LLM(
            args.model,
            policy={"name": "kara", "window": 128, "buffer": 16},
            max_num_seqs=args.max_num_seqs,
            num_gpu_blocks_override=ceil(args.pool_share * blocks_at_once(workload, _BLOCK)),
            block_size=_BLOCK,
            speculative_config=config,
        ).engine
        self.seconds = 0.0
        self.answers: dict[str, list[int]] = {}
        self.hurried: set[str] = set()
        """Requests that had an event before its time, because blocks ran out."""
        self.steps = self.event_steps = 0
        self._workload, self._between, self._added = workload, args.steps_between, 0

    @property
    def busy(self) -> bool:
        return self._added < len(self._workload) or self.engine.has_unfinished_requests

    def _add(self) -> None:
        """The requests whose turn it is."""
        while self._added < len(self._workload) and self.steps >= self._added * self._between:
            length = self._workload.max_tokens(self._added)
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            prompt = self._workload.prompt(self._added, [])
            assert prompt is not None, "a task has one turn"
            self.engine.add_request(str(self._added), prompt, params)
            self._added += 1

    def run(self, seconds: float) -> None:
        """Steps of a turn."""
        began = time.thread_time()
        while self.busy and time.thread_time() < began + seconds:
            self._add()
            self.steps += 1
            events = self.engine.core.scheduler.events
            before = events.compactions
            outputs = self.engine.step()
            self.event_steps += events.compactions > before
            for output in outputs:
                if any(event.reason == "pressure" for event in output.compactions):
                    self.hurried.add(output.request_id)
                if output.finished:
                    self.answers[output.request_id] = list(output.outputs[0].token_ids)
        self.seconds += time.thread_time() - began


def run_in_turns(sides: Sequence[Side], first: int) -> None:
    """Run both to the end; side ``first`` begins each pair of turns."""
    while any(side.busy for side in sides):
        for at in (first, 1 - first):
            sides[at].run(0.1)


def other_answers(a: Side, b: Side) -> set[str]:
    """Requests with another answer; ``SystemExit`` unless blocks ran short for each of them."""
    changed = {which for which, answer in a.answers.items() if answer != b.answers[which]}
    if changed - a.hurried - b.hurried:
        raise SystemExit("an answer has changed")
    return changed


def compare(args: argparse.Namespace, workload: Workload, first: int) -> float:
    """Times plain decoding; side ``first`` begins each pair of turns."""
    sides = Side(args, workload, {}), Side(args, workload, _NGRAM)
    run_in_turns(sides, first)
    off, on = sides
    changed = other_answers(off, on)
    stats = on.engine.stats()
    guessed, right = stats.draft_tokens_total, stats.accepted_tokens_total
    ratio = off.seconds / on.seconds
    sys.stdout.write(f"{ratio:.3f} times plain decoding; {guessed} guessed, {right} right")
    sys.stdout.write(f"; {len(changed)} other answers\n")
    return ratio


def compare_waiting(args: argparse.Namespace, workload: Workload, first: int) -> float:
    """Times events that wait for others beside events that do not; nothing is guessed."""
    sides = alone, together = Side(args, workload, {}), Side(args, workload, {})
    gathering = alone.engine.core.scheduler.events.gathering
    gathering.ready = lambda due, has_room: due  # type: ignore[method-assign]
    run_in_turns(sides, first)
    changed = other_answers(alone, together)
    ratio = alone.seconds / together.seconds
    steps = " and ".join(f"{side.event_steps} of {side.steps}" for side in sides)
    sys.stdout.write(f"{ratio:.3f} times as fast; steps with events {steps}")
    sys.stdout.write(f"; {len(changed)} other answers\n")
    return ratio


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="kvserve/tiny-long", help="default: kvserve/tiny-long")
    parser.add_argument("--task", choices=TASKS, default="long-chain-1000", metavar="NAME")
    for name, usual in (("num-prompts", 32), ("max-num-seqs", 16), ("repeat", 4)):
        parser.add_argument(f"--{name}", type=at_least(1), default=usual, metavar="N")
    words = "requests arrive N steps apart (default: all at once)"
    parser.add_argument("--steps-between", type=at_least(0), default=0, metavar="N", help=words)
    parser.add_argument("--pool-share", type=number(0), default=0.25, metavar="X")
    words = "events that wait beside events that do not, without guesses"
    parser.add_argument("--waiting", action="store_true", help=words)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    torch.set_num_threads(1)
    tokenizer = LLM(args.model).tokenizer
    assert tokenizer is not None, "the shipped models have one"
    workload = task_prompts(args.task, args.num_prompts, tokenizer, 0)
    how = compare_waiting if args.waiting else compare
    ratios = [how(args, workload, turn % 2) for turn in range(args.repeat)]
    sys.stdout.write(
        f"median {median(ratios):.3f} of {args.repeat} ({min(ratios):.3f} to {max(ratios):.3f})\n"
    )


if __name__ == "__main__":
    main()
