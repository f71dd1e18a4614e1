"""The live page's cost to a saturated engine: CPU seconds of steps with and without a viewer.

    python -m bench.serving.page_cost

All work on the server's side counts: views of the pool, sending them to the server's process, and
the event that all viewers share. Stretches of steps with and without a viewer alternate, and so
does which comes first: other load slows both alike, and so do caches that grow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass

import msgspec

from kvserve import LLM, SamplingParams
from kvserve.engine.core.pool_watch import PoolWatch
from kvserve.engine.messages import StepOutputs
from kvserve.server.state.heap import freeze_heap
from kvserve.server.ui.event_feed import encode_event


@dataclass
class Stretch:
    """Steps with or without a viewer: their CPU seconds, and the page's part of these in the
    engine's process and in the server's."""

    seconds: float = 0.0
    engine: float = 0.0
    server: float = 0.0
    views: int = 0
    bytes: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="kvserve/tiny")
    parser.add_argument("--policy", default='{"name": "kara", "window": 128, "buffer": 16}')
    parser.add_argument("--kv-layout", default="auto")
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=144, help="in a stretch: one period of Kara's")
    parser.add_argument("--stretches", type=int, default=8)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        policy=json.loads(args.policy),
        max_num_seqs=args.num_seqs,
        num_gpu_blocks_override=args.blocks,
        kv_layout=args.kv_layout,
    )
    core, watch = llm.engine.core, PoolWatch(llm.engine.core)
    params = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
    for number in range(args.num_seqs):
        llm.engine.add_request(str(number), [3 + number % 50] * 64, params)
    freeze_heap()  # as servers do
    _run(llm, watch, args.steps, False)
    pairs = [_pair(llm, watch, args.steps, number % 2 == 1) for number in range(args.stretches)]
    core.close()
    ratios = sorted(on.seconds / off.seconds for off, on in pairs)
    watched = [on for _, on in pairs]
    views = sum(stretch.views for stretch in watched)
    size = sum(s.bytes for s in watched) / max(views, 1)
    total = sum(s.seconds for s in watched)
    engine, server = sum(s.engine for s in watched), sum(s.server for s in watched)
    print(f"{args.num_seqs} sequences, {args.blocks} blocks, {args.policy}")
    print(f"{views} views of {size / 1e3:.1f} KB")
    for where, seconds in (("engine", engine), ("server", server)):
        each = 1e3 * seconds / max(views, 1)
        print(
            f"in the {where}'s process: {each:.2f} ms each, {each * 5 / 10:.2f} % of a core at 5 Hz"
        )
    print(
        "watched over unwatched stretches, both processes' work in one, median: "
        f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )
    print(f"the page's share of the watched stretches: {(engine + server) / total:.2%}")


def _pair(llm: LLM, watch: PoolWatch, steps: int, watched_first: bool) -> tuple[Stretch, Stretch]:
    """Two stretches in a row: without a viewer, and with one."""
    first = _run(llm, watch, steps, watched_first)
    second = _run(llm, watch, steps, not watched_first)
    return (second, first) if watched_first else (first, second)


def _run(llm: LLM, watch: PoolWatch, steps: int, on: bool) -> Stretch:
    """Run a stretch of steps; ``on``: with a viewer."""
    watch.on = on
    stretch, started = Stretch(), time.process_time()
    for _ in range(steps):
        llm.engine.core.step()
        if watch.due:
            before = time.process_time()
            sent = msgspec.msgpack.encode(StepOutputs(pool=watch.view()))
            between = time.process_time()
            pool = msgspec.msgpack.decode(sent, type=StepOutputs).pool
            assert pool is not None
            stretch.bytes += len(encode_event(pool.stats, pool))
            stretch.views += 1
            stretch.engine += between - before
            stretch.server += time.process_time() - between
    stretch.seconds = time.process_time() - started
    return stretch


if __name__ == "__main__":
    main()
