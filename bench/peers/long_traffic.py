"""Long answers on a pool that is too small for them, on kvserve and on vLLM, in turns.

All engines get the same prompts, the same lengths of answers, as many bytes for keys and values,
and one thread on the same CPU. llama.cpp and transformers' `generate` are left out, because their
cache is one static batch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.harness.datasets.workload import (
    DEFAULT_BLOCK_SIZE,
    Prompts,
    blocks_at_once,
    lognormal_lengths,
    random_prompts,
    task_prompts,
)
from bench.harness.reports.report import Column, Row
from bench.harness.setup.checkpoint import SHAPES
from bench.harness.setup.policy_spec import PolicySpec, each_as_held
from bench.peers.contestants import Contestant
from bench.peers.peer import PEERS, PeerError, PeerProcess
from kvserve.engine.frontend.tokenizer import Tokenizer

COLUMNS = (
    Column("engine", "engine", left=True),
    Column("policy", "policy", left=True),
    Column("cache held in", "kv_cache_dtype", left=True),
    Column("MiB of KV", "kv_mib", ".1f"),
    Column("output tok/s", "output_tok_s", ",.0f"),
    Column("of all runs", "spread"),
    Column("of vLLM", "vs_vllm", ".2f"),
)
_WARMUP_TOKENS = 8
_SECONDS = {"wall": "seconds", "cpu": "cpu_seconds"}
_VLLM_BLOCK = 32  # tokens; its attention for CPUs takes only multiples of 32
_VLLM_DTYPES = ("auto", "fp8")  # e4m3, one scale for all
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class LongTraffic:
    """The requests, and the pool as a ``share`` of what all of them need together, uncompressed."""

    workload: Prompts
    longest: int
    share: float
    block_bytes: int
    number_bytes: int

    @classmethod
    def of(cls, args: argparse.Namespace, shape: str, dtype: str) -> LongTraffic:
        """Random prompts, and answers of log-normal lengths, for one of ``SHAPES``."""
        rng, config = np.random.default_rng(args.seed), SHAPES[shape]
        given = args.num_prompts, args.output_len, args.output_sigma, args.output_cap
        outputs = lognormal_lengths(rng, *given).tolist()
        lengths = [(args.input_len, length) for length in outputs]
        workload = random_prompts(lengths, config["vocab_size"], args.seed)
        return cls.sized(workload, config, args.pool_share, dtype)

    @classmethod
    def of_task(cls, args: argparse.Namespace, model: Path, dtype: str) -> LongTraffic:
        """The prompts of ``args.task``; each answer is as long as the right one."""
        tokenizer = Tokenizer(str(model))
        task = task_prompts(args.task, args.num_prompts, tokenizer, args.seed)
        prompts = [task.prompt(index, ()) or [] for index in range(len(task))]
        ends = zip(task.full_lengths(), prompts, strict=True)
        limits = [cached + 1 - len(prompt) for cached, prompt in ends]
        config = json.loads((model / "config.json").read_text())
        workload = Prompts(prompts, limits, ignore_eos=True)
        return cls.sized(workload, config, args.pool_share, dtype)

    @classmethod
    def sized(
        cls, workload: Prompts, config: dict[str, Any], share: float, dtype: str
    ) -> LongTraffic:
        """These requests on a pool for ``config``'s model with keys and values in ``dtype``."""
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        numbers = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
        size = _BYTES[dtype]
        longest = max(map(sum, zip(map(len, workload.prompts), workload.limits, strict=True)))
        return cls(workload, longest, share, numbers * DEFAULT_BLOCK_SIZE * size, size)

    @property
    def blocks(self) -> int:
        return ceil(self.share * blocks_at_once(self.workload, DEFAULT_BLOCK_SIZE))

    def settings(self, peer: str | None, kv_cache_dtype: str) -> dict[str, Any]:
        """The settings that an engine loads with."""
        common = {"max_num_seqs": len(self.workload), "max_model_len": self.longest}
        if peer is None:
            return {**common, "kv_cache_memory": (self.blocks + 1) * self.block_bytes}
        wider = self.number_bytes if kv_cache_dtype == "fp8" else 1
        blocks = ceil(wider * self.blocks * DEFAULT_BLOCK_SIZE / _VLLM_BLOCK)
        return {
            **common,
            "num_gpu_blocks_override": blocks + 1,  # vLLM leaves one of them empty, too
            "block_size": _VLLM_BLOCK,
        }

    def describe(self) -> str:
        limits = self.workload.limits
        mib = self.blocks * self.block_bytes / 2**20
        return (
            f"{len(limits)} answers of {min(limits):,} to {max(limits):,} tokens, "
            f"{sum(limits) / len(limits):,.0f} on average; {mib:.1f} MiB of keys and values for "
            f"everybody, {self.share:.2f} of what all of them want"
        )


@dataclass
class Side:
    """One row of the table, and its rate in each turn."""

    contestant: Contestant
    facts: dict[str, Any]
    rates: list[float] = field(default_factory=list)

    @classmethod
    def of_kvserve(cls, spec: PolicySpec, kv_cache_dtype: str) -> Side:
        settings: dict[str, Any] = {"policy": spec.as_dict, "kv_cache_dtype": kv_cache_dtype}
        name = f"kvserve {spec.label} {kv_cache_dtype}"
        facts = {"engine": "kvserve", "policy": spec.label, "kv_cache_dtype": kv_cache_dtype}
        return cls(Contestant(name, "kvserve", settings=settings), facts)

    @classmethod
    def of_vllm(cls, kv_cache_dtype: str) -> Side:
        settings = {"kv_cache_dtype": kv_cache_dtype}
        contestant = Contestant(f"vllm {kv_cache_dtype}", "vLLM CPU", "vllm", settings)
        return cls(contestant, {"engine": contestant.title, **settings})


class LongCase:
    """One shape and dtype; the engines take turns."""

    def __init__(
        self, args: argparse.Namespace, traffic: LongTraffic, dtype: str, cpu: int
    ) -> None:
        self._args = args
        self._dtype = dtype
        self._cpu = cpu
        self.traffic = traffic
        self.versions: dict[str, str] = {}
        self.notes: list[str] = []
        self._sides = [
            Side.of_kvserve(spec, held_in)
            for spec, held_in in each_as_held(args.policy, args.kv_cache_dtypes)
        ]
        if PEERS["vllm"].missing:
            self.notes.append(str(PEERS["vllm"].missing))
        else:
            held = [name for name in args.kv_cache_dtypes if name in _VLLM_DTYPES]
            self._sides += [Side.of_vllm(name) for name in held or ("auto",)]

    def measure(self, model: Path, silent: bool | None) -> None:
        total = self._args.repeat * len(self._sides)
        with ExitStack() as stack, tqdm(total=total, unit="run", disable=silent) as bar:
            processes = {
                side.contestant.name: self._started(side, model, stack, bar) for side in self._sides
            }
            for _ in range(self._args.repeat):
                for side in self._sides:
                    bar.set_description(side.contestant.name)
                    side.rates.append(self._run(processes[side.contestant.name]))
                    bar.update()

    def rows(self, facts: Row) -> list[Row]:
        peer = next((side.rates for side in self._sides if side.contestant.peer), None)
        return [{**self._row(side, peer), **facts} for side in self._sides if side.rates]

    def _row(self, side: Side, peer: Sequence[float] | None) -> dict[str, Any]:
        traffic, rates = self.traffic, side.rates
        ratios = [own / other for own, other in zip(rates, peer or (), strict=False)]
        return {
            **side.facts,
            "kv_mib": traffic.blocks * traffic.block_bytes / 2**20,
            "output_tok_s": median(rates),
            "output_tok_s_all": rates,
            "spread": f"{min(rates):,.0f}–{max(rates):,.0f}" if len(rates) > 1 else None,
            "vs_vllm": median(ratios) if ratios else None,
            "vs_vllm_all": ratios,
        }

    def _started(self, side: Side, model: Path, stack: ExitStack, bar: tqdm) -> PeerProcess:
        contestant = side.contestant
        bar.set_description(f"loading {contestant.name}")
        process = contestant.start(self._cpu)
        stack.callback(process.close)
        given = self.traffic.settings(contestant.peer, side.facts["kv_cache_dtype"])
        settings = {**given, **contestant.settings}
        self.versions |= process.load(model=str(model), dtype=self._dtype, **settings)
        prompts = [self.traffic.workload.prompts[0]]
        process.run(prompts=prompts, max_tokens=_WARMUP_TOKENS)
        return process

    def _run(self, process: PeerProcess) -> float:
        limits = list(self.traffic.workload.limits)
        result = process.run(prompts=list(self.traffic.workload.prompts), max_tokens=limits)
        if [len(row) for row in result["tokens"]] != limits:
            raise PeerError("answers of other lengths than were asked for")
        return sum(limits) / float(result[_SECONDS[self._args.clock]])
