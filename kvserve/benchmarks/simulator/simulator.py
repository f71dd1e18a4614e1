"""The real scheduler and block pool without a model; ``cost_model`` gives the time of each step.

Output lengths are given, and every generated token is zero. Admission, cache contents, events and
preemptions are those of the engine; the seconds are as good as the cost model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tqdm import tqdm

from kvserve.benchmarks.simulator.cost_model import CostModel, Queries
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.scheduler.triggers.trigger import Trigger


class Simulation:
    """Plays requests that all arrive at the start, on one scheduler; ``now`` is simulated seconds.

    prompts, outputs: lengths in tokens [n]. Raises ``ValueError`` for a request that cannot fit.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        trigger: Trigger,
        cost: CostModel,
        queries: Queries,
        prompts: IntArray,
        outputs: IntArray,
    ) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.finished: list[Sequence] = []
        self._cost = cost
        self._queries = queries
        self._event_s = 0.0
        self._tokens = 0
        self._steps: list[tuple[int, int, int, int]] = []
        self._rates: list[float] = []
        self._last_token: IntArray = np.full(len(prompts), np.nan)
        self._gaps: list[IntArray] = []
        for i, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
            needed = scheduler.blocks_at_least(prompt, prompt + output, trigger)
            if needed > scheduler.pool.capacity:
                raise ValueError(
                    f"a prompt of {prompt} tokens needs {needed} blocks at once and the pool has "
                    f"{scheduler.pool.capacity}"
                )
            tokens = np.zeros(prompt, np.int32)
            tokens[0] = i  # no two prompts begin alike
            scheduler.add(Sequence(i, tokens, prompt, prompt + output, (), 0, trigger))

    @property
    def unfinished(self) -> int:
        """Requests still to be answered."""
        return len(self._last_token) - len(self.finished)

    def run(self, bar: tqdm | None = None) -> dict[str, Any]:
        """Play to the end."""
        while self.unfinished:
            done = self.step()
            if bar is not None:
                bar.update(done)
        return self.figures()

    def step(self) -> int:
        """One step of the scheduler; returns how many requests ended."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        events = self._cost.events(output.compactions, self._queries)
        seconds = events + self._swaps(output) + self._forward(output)
        self.now += seconds
        self._event_s += events
        self._record(output, seconds)
        finished = scheduler.update(output, np.zeros(len(output.sampled), np.int32))
        self.finished += finished
        return len(finished)

    def figures(self) -> dict[str, Any]:
        """The figures of `kvserve bench throughput`, in simulated time."""
        running, held, logical, used = np.array(self._steps, np.int64).T
        capacity = self.scheduler.pool.capacity
        gaps = np.concatenate(self._gaps) * 1e3
        events = self.scheduler.events
        return {
            "requests": len(self.finished),
            "output_tokens": self._tokens,
            "simulated_s": self.now,
            "output_tok_s": self._tokens / self.now,
            "mean_step_output_tok_s": float(np.mean(self._rates)),
            "steps": len(running),
            "mean_running": float(running.mean()),
            "peak_running": int(running.max()),
            "mean_held_tokens": float(held.mean()),
            "held_over_logical": float(held.sum() / logical.sum()),
            "held_per_sequence": float(held.sum() / running.sum()),
            "mean_pool_usage": float(used.mean() / capacity),
            "blocks_total": capacity,
            "compactions": events.compactions,
            "evicted_tokens": events.tokens_evicted,
            "event_share": self._event_s / self.now,
            "preemptions": self.scheduler.num_preemptions,
            "swaps": self.scheduler.num_swaps,
            "cut_short": sum(seq.num_tokens < seq.max_len for seq in self.finished),
            "itl_p50_ms": float(np.percentile(gaps, 50)),
            "itl_p99_ms": float(np.percentile(gaps, 99)),
            "itl_max_ms": float(gaps.max()),
        }

    def _swaps(self, output: SchedulerOutput) -> float:
        blocks = sum(len(task.host_blocks) for task in (*output.swap_outs, *output.swap_ins))
        layout = self.scheduler.layout
        return self._cost.swap(blocks * layout.block_size / layout.groups)

    def _forward(self, output: SchedulerOutput) -> float:
        chunks, lens = output.prefill, self.scheduler.blocks.kv_lens[0, :, 0]
        rows = np.concatenate([np.arange(output.num_decoding), chunks.rows])
        held = lens[rows] + self._cost.in_windows(self.scheduler.rows.num_computed[rows])
        seen = lens[chunks.rows] - chunks.lengths // 2
        seen = seen + self._cost.in_windows(seen)
        pairs = float((chunks.lengths.astype(np.int64) * seen).sum())
        return self._cost.step(output.num_tokens, len(output.sampled), float(held.sum()), pairs)

    def _record(self, output: SchedulerOutput, seconds: float) -> None:
        scheduler, n = self.scheduler, self.scheduler.rows.num_rows
        held = int(scheduler.blocks.kv_lens[0, :n, 0].sum())
        logical = int(scheduler.rows.num_computed[:n].sum())
        used = scheduler.pool.capacity - scheduler.blocks.headroom
        self._steps.append((n, held, logical, used))
        self._rates.append(len(output.sampled) / seconds)
        self._tokens += len(output.sampled)
        ids = np.fromiter((seq.seq_id for seq in output.sampled), np.int64, len(output.sampled))
        gaps = self.now - self._last_token[ids]
        self._gaps.append(gaps[~np.isnan(gaps)].astype(np.float32))
        self._last_token[ids] = self.now
