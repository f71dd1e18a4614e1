"""transformers' ``generate`` on the same prompts, in static batches, as a baseline."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvserve.benchmarks.datasets.workload import Workload
from kvserve.benchmarks.measuring.measure import Figures, accuracy
from kvserve.engine.frontend.tokenizer import Tokenizer


def generate(
    path: Path,
    dtype: str,
    tokenizer: Tokenizer | None,
    warmup: Workload | None,
    workload: Workload,
    batch: int,
    bar: tqdm,
) -> Figures:
    """Figures of one run. A batch has prompts of equal length and lasts until all its rows end."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.to(device).eval()
    stop = [] if workload.ignore_eos else _as_list(model.generation_config.eos_token_id)
    model.generation_config.eos_token_id = stop or None
    model.generation_config.pad_token_id = 0
    if warmup is not None:
        _Run(model, tokenizer, stop, batch).play(warmup, None)
    run = _Run(model, tokenizer, stop, batch)
    answers = run.play(workload, bar)
    return {
        "output_tokens": run.tokens,
        "wall_s": run.seconds,
        "output_tok_s": run.tokens / run.seconds,
        "steps": run.steps,
        "mean_running": run.tokens / run.steps,
        "peak_running": run.peak,
        **accuracy(workload, answers),
    }


class _Run:
    def __init__(self, model: Any, tokenizer: Tokenizer | None, stop: list[int], batch: int):
        self._model = model
        self._tokenizer = tokenizer
        self._stop = stop
        self._batch = batch
        self.seconds = 0.0
        self.tokens = self.steps = self.peak = 0

    def play(self, workload: Workload, bar: tqdm | None) -> list[list[str]]:
        """Turn by turn over all conversations; returns their answers."""
        answers: list[list[str]] = [[] for _ in range(len(workload))]
        while True:
            prompts = {i: workload.prompt(i, said) for i, said in enumerate(answers)}
            pending = {i: prompt for i, prompt in prompts.items() if prompt is not None}
            if not pending:
                return answers
            for members in _equal_length_batches(pending, workload, self._batch):
                limit = workload.max_tokens(members[0])
                texts = self._generate([pending[i] for i in members], limit)
                for i, text in zip(members, texts, strict=True):
                    answers[i].append(text)
                    if bar is not None and workload.prompt(i, answers[i]) is None:
                        bar.update()

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[list[int]], limit: int) -> list[str]:
        started = time.perf_counter()
        ids = torch.tensor(prompts, device=self._model.device)
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False
        )
        rows = [self._until_stop(row) for row in out[:, ids.shape[1] :].tolist()]
        self.seconds += time.perf_counter() - started
        self.tokens += sum(map(len, rows))
        self.steps += out.shape[1] - ids.shape[1]
        self.peak = max(self.peak, len(prompts))
        if self._tokenizer is None:
            return [""] * len(rows)
        return [self._tokenizer.decode(row) for row in rows]

    def _until_stop(self, row: list[int]) -> list[int]:
        """A row up to its stop token, without the padding after it."""
        ends = [row.index(token) + 1 for token in self._stop if token in row]
        return row[: min(ends, default=len(row))]


def _equal_length_batches(
    prompts: dict[int, list[int]], workload: Workload, batch: int
) -> Iterator[list[int]]:
    """Batches of prompts that have the same length and the same limit."""
    by_lengths: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, prompt in prompts.items():
        by_lengths[len(prompt), workload.max_tokens(index)].append(index)
    for members in by_lengths.values():
        for start in range(0, len(members), batch):
            yield members[start : start + batch]


def _as_list(eos: int | list[int] | None) -> list[int]:
    return eos if isinstance(eos, list) else [] if eos is None else [eos]
