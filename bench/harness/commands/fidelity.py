"""``kvserve eval --fidelity``: how far policies' next tokens are from the full cache's.

It needs no reference answers: any text is forced through the engine, or the full cache's own
answers are. Figures are of the second half of each text's tokens, where events have begun; the
curve in the JSON file is of all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.datasets.datasets import read_tasks
from bench.harness.measuring.benchmark import Comparison
from bench.harness.measuring.fidelity import (
    CITIES,
    Fidelity,
    ForcedText,
    LogProbs,
    bytes_held,
    fidelity,
    pieces,
    with_facts,
)
from bench.harness.measuring.measure import play, standard_error
from bench.harness.reports.plots import plot_fidelity
from bench.harness.reports.report import Report, columns
from bench.harness.setup.options import at_least
from bench.harness.setup.policy_spec import NO_COMPRESSION, PolicySpec
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.log import ConfigError, RequestError
from kvserve.progress import progress

_COLUMNS = columns(
    *("text", "policy", "kv_cache_dtype", "mean_held_bytes", "of_full", "of_full_at_end"),
    *("kl", "kl_error", "nll_lost", "nll_lost_error", "same", "facts", "events_per_text", "n"),
)
_AT_ONCE = 1 << 30  # bytes of the full cache's log-probabilities that are kept at once
_PROMPT = 64
_BINS = 16
_Key = tuple[str, str, str]
"""A kind of text, the label of what was asked for, and the type that its cache is held in."""


def add_fidelity_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fidelity to the full cache, instead of tasks")
    words = (
        "force texts through the engine under each policy and compare the distributions of next "
        "tokens with the full cache's: KL divergence, likelihood lost, equal first choices"
    )
    group.add_argument("--fidelity", action="store_true", help=words)
    words = "text files (default: Python's own documentation)"
    group.add_argument("--text", nargs="+", type=Path, metavar="FILE", default=[], help=words)
    words = "force the full cache's own answers to --tasks or --benchmark"
    group.add_argument("--from-answers", action="store_true", help=words)
    words = "tokens of each piece of a text (default: 3000)"
    group.add_argument("--text-len", type=at_least(128), default=3000, metavar="N", help=words)
    words = f"sentences planted in each piece and asked for at its end, up to {len(CITIES)}"
    group.add_argument("--facts", type=at_least(0), default=0, metavar="N", help=words)


def check_fidelity_arguments(args: argparse.Namespace) -> None:
    """Refuse combinations that have no meaning."""
    if not args.fidelity:
        for flag in ("text", "facts", "from_answers"):
            if getattr(args, flag):
                args.fail(f"--{flag.replace('_', '-')} needs --fidelity")
        return
    if args.n > 1 or args.match_bytes_per_sequence:
        flag = "--n" if args.n > 1 else "--match-bytes-per-sequence"
        args.fail(f"{flag} is for answers that are graded, not for --fidelity")
    if args.temperature and not args.from_answers:
        args.fail("--temperature is of the answers of --from-answers; a text is forced as it is")
    if args.facts > len(CITIES):
        args.fail(f"--facts: at most {len(CITIES)}")
    if args.from_answers and (args.text or args.facts):
        args.fail("--from-answers: answers are the text; leave --text and --facts out")
    if not args.from_answers and (args.tasks or args.benchmark):
        args.fail("--fidelity reads --text; with --from-answers it takes --tasks or --benchmark")
    if args.from_answers and not (args.tasks or args.benchmark):
        args.fail("--from-answers needs --tasks or --benchmark, which have the prompts")


class FidelityRun(Comparison):
    """Every policy on every text; the full cache first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refused: dict[str, str] = {}
        self._found: dict[_Key, tuple[PolicySpec, list[tuple[ForcedText, Fidelity]]]] = {}

    # ---- texts --------------------------------------------------------------------------------

    def _texts(self) -> Iterator[tuple[str, list[ForcedText]]]:
        """The texts of each kind; with ``--match-bytes`` one more, the last, for finding budgets
        alone."""
        trial = self.target is not None
        if self.args.from_answers:
            yield from self._answers(self.args.num_samples + trial)
            return
        try:
            sources = [(path.stem, path.read_text(errors="replace")) for path in self.args.text]
        except OSError as error:
            raise ConfigError(f"--text: {error.filename}: {error.strerror}") from None
        if not sources:
            from pydoc_data.topics import topics

            sources = [("python-docs", "\n\n".join(topics[name] for name in sorted(topics)))]
        length = self.args.text_len
        for name, source in sources:
            tokens = np.array(self._encode(source), np.int32)
            if len(tokens) < length:
                raise ConfigError(f"--text: {name} has {len(tokens):,} tokens, fewer than {length}")
            first = np.array(self.tokenizer.encode(""), np.int32)
            found = pieces(tokens, self.args.num_samples, length - len(first), trial=trial)
            yield (
                name,
                [
                    with_facts(
                        f"{name} {i}",
                        np.concatenate([first, piece]),
                        _PROMPT,
                        self.args.facts,
                        self._encode,
                        np.random.default_rng([self.args.seed, i]),
                    )
                    for i, piece in enumerate(found)
                ],
            )

    def _answers(self, count: int) -> Iterator[tuple[str, list[ForcedText]]]:
        """The full cache's answers to first turns."""
        args = self.args
        engine = self.engines.build(NO_COMPRESSION, kv_cache_dtype="auto")
        drawn = {"temperature": args.temperature, "top_p": args.top_p}
        drawn["max_tokens"] = args.max_new_tokens or args.text_len
        for name, workload in read_tasks(args, self.tokenizer, self.longest, count).items():
            first = [replace(sample, turns=sample.turns[:1]) for sample in workload.samples]
            played = play(
                engine,
                replace(workload, samples=first),
                settings=lambda index, turn: {**drawn, "seed": args.seed + index},
            )
            texts = []
            for i, [turn] in enumerate(played.turns):
                prompt, answer = turn.prompt_token_ids, turn.outputs[0].token_ids
                if len(answer) > 1:
                    ids = np.array([*prompt, *answer], np.int32)
                    texts.append(ForcedText(f"{name} {i}", ids, len(prompt)))
            yield name, texts

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    # ---- measuring ----------------------------------------------------------------------------

    def measure(self) -> None:
        full = NO_COMPRESSION, "auto"
        others = [each for each in self.specs if each != full]
        for kind, texts in self._texts():
            trial = [texts.pop()] if self.target is not None else []
            rows = [(*full, NO_COMPRESSION)]
            rows += [(*each, self._matched(*each, trial)) for each in others]
            longest = max(len(text.token_ids) for text in texts)
            fit = _AT_ONCE // (4 * longest * self.checkpoint.spec.vocab_size)
            at_once = max(1, min(fit, self.args.max_num_seqs))
            title, hidden = f"{kind}: texts x rows", self.args.disable_tqdm
            bar = progress(total=len(texts) * len(rows), desc=title, hidden=hidden)
            with bar:
                for start in range(0, len(texts), at_once):
                    part = texts[start : start + at_once]
                    says: LogProbs = {}
                    for spec, stored, ran in rows:
                        if f"{spec.label} in {stored}" in self._refused:
                            continue
                        try:
                            figures = fidelity(self._build(ran, stored, part), part, says)
                        except (ConfigError, RequestError) as error:
                            self._refuse(spec, stored, error)
                            continue
                        found = self._found.setdefault((kind, spec.label, stored), (ran, []))
                        found[1].extend(zip(part, figures, strict=True))
                        bar.update(len(part))

    def _matched(self, spec: PolicySpec, stored: str, trial: Sequence[ForcedText]) -> PolicySpec:
        """The policy as it runs; bytes are matched on a text that does not count."""

        def held(tried: PolicySpec, dtype: str) -> float:
            return float(np.mean(bytes_held(self._build(tried, dtype, trial), trial)))

        try:
            return self.matched(spec, stored, sum(len(text.token_ids) for text in trial), held)
        except (ConfigError, RequestError) as error:
            self._refuse(spec, stored, error)
        return spec

    def _refuse(self, spec: PolicySpec, stored: str, error: Exception) -> None:
        """With ``--policy all`` what cannot run is named; what was asked for by name ends it, and
        so does the full cache."""
        if not self.args.every_policy or (spec, stored) == (NO_COMPRESSION, "auto"):
            raise error
        self._refused[f"{spec.label} in {stored}"] = str(error)

    def _build(self, spec: PolicySpec, stored: str, texts: Sequence[ForcedText]) -> LLMEngine:
        """An engine that holds these texts at once."""
        model = self.checkpoint.spec
        entry = 8 * model.num_layers * model.num_kv_heads * model.head_dim
        tokens = sum(len(text.token_ids) + 1024 for text in texts)
        return self.engines.build(
            spec,
            kv_cache_dtype=stored,
            max_num_seqs=len(texts),
            kv_cache_memory=None if self.args.num_gpu_blocks_override else 2 * entry * tokens,
            async_scheduling=False,
            enable_prefix_caching=False,
        )

    # ---- what is reported ---------------------------------------------------------------------

    def report(self) -> Report:
        rows = [self._row(*key) for key in self._found]
        settings = self.settings(
            "num_samples", "text_len", "facts", "temperature", "top_p", "match_bytes"
        )
        settings["text"] = [str(path) for path in self.args.text]
        about = [
            f"{self.checkpoint.name}; KL divergence of the full cache's distribution of the next "
            "token to the policy's, and likelihood lost, in nats a token, with standard errors "
            "over texts; bytes and figures are of the second half of each text"
        ]
        notes = [f"{name}: cannot run: {why}" for name, why in self._refused.items()]
        plots = plot_fidelity(rows, self.args.save_plots) if self.args.save_plots and rows else []
        return Report("fidelity", about, _COLUMNS, rows, settings, notes, plots=plots)

    def _row(self, kind: str, label: str, stored: str) -> dict[str, Any]:
        spec, found = self._found[kind, label, stored]
        full = self._found[kind, NO_COMPRESSION.label, "auto"][1][: len(found)]
        kl = [figures.kl[text.later].mean().item() for text, figures in found]
        lost = [
            (figures.nll - own.nll)[text.later].mean().item()
            for (text, figures), (_, own) in zip(found, full, strict=True)
        ]
        facts = [hit for text, figures in found for hit in figures.facts_found(text)]
        held, whole = (_mean(f.mean_bytes(text) for text, f in each) for each in (found, full))
        end, whole_end = (_mean(f.bytes_at_end(text) for text, f in each) for each in (found, full))
        return {
            "text": kind,
            "policy": spec.label,
            "policy_args": spec.as_dict,
            "kv_cache_dtype": stored,
            "mean_held_bytes": held,
            "of_full": held / whole,
            "bytes_at_end": end,
            "of_full_at_end": end / whole_end,
            "kl": _mean(kl),
            "kl_error": standard_error(kl),
            "nll": _mean(f.nll[text.later].mean().item() for text, f in found),
            "nll_lost": _mean(lost),
            "nll_lost_error": standard_error(lost),
            "same": _mean(f.same[text.later].float().mean().item() for text, f in found),
            "facts": _mean(facts) if facts else None,
            "events_per_text": _mean(figures.events for _, figures in found),
            "n": len(found),
            "curve": _curve(found),
        }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))


def _curve(found: Sequence[tuple[ForcedText, Fidelity]]) -> list[float]:
    """KL over position: the mean of each sixteenth of the texts."""
    parts = [
        [part.mean().item() for part in figures.kl[: text.num_text].chunk(_BINS)]
        for text, figures in found
    ]
    shortest = min(map(len, parts))
    return np.mean([part[:shortest] for part in parts], axis=0).tolist()
