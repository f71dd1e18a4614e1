"""What events that wait for each other save: CPU time of two engines, without and with it.

    python -m bench.event_turns
    python -m bench.event_turns --steps-between 41

Both are in one process and take turns of a tenth of a second, on one thread. Answers have to be the
same, token for token, but for requests that had an event before its time because blocks ran out.
"""

from __future__ import annotations

import argparse
import sys

from bench.guess_turns import Side, other_answers, report, run_in_turns, traffic_options
from kvserve.benchmarks.datasets.workload import Workload


def compare(args: argparse.Namespace, workload: Workload, first: int) -> float:
    """Times both; side ``first`` begins each pair of turns."""
    sides = Side(args, workload, {}), Side(args, workload, {})
    gathering = sides[0].engine.core.scheduler.events.gathering
    gathering.ready = lambda due, has_room: due  # type: ignore[method-assign]
    run_in_turns(sides, first)
    changed = other_answers(*sides)
    alone, together = sides
    ratio = alone.seconds / together.seconds
    steps = " and ".join(f"{side.event_steps} of {side.steps}" for side in sides)
    sys.stdout.write(f"{ratio:.3f} times as fast; steps with events {steps}")
    sys.stdout.write(f"; {len(changed)} other answers\n")
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    traffic_options(parser)
    report(parser.parse_args(), compare)


if __name__ == "__main__":
    main()
