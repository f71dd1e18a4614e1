"""Every policy on the real engine: what must hold whatever a policy is, checked for each case."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvserve import LLM, SamplingParams
from kvserve.engine.frontend.inspect import Event
from kvserve.engine.models.delta_weights import rotated_order
from kvserve.engine.policies import registry
from kvserve.engine.policies.scoring import Observation
from kvserve.entry_format import FORMATS, EntryFormat
from kvserve.kernels.store.quantized_entries import QuantizedVectors, quantize
from kvserve.outputs import KVCacheDetails
from kvserve.scheduler.layout import Granularity
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.dense_reference import DensePass, Vectors, dense_pass, load_dense
from tests.engine.few_reference import Stored
from tests.engine.guesses import SPECULATIVE, Oracle
from tests.engine.policies.cases import CASES, PROMPT, SEEN, TOKENS, Case, LongEntries
from tests.engine.policies.one_row import plug_ins
from tests.engine.recorder import Choice, Record, Recorder, vectors_of
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import slow

(IDS,) = random_prompts([PROMPT], seed=3)
WINDOW = next(case.make().event_trigger.num_queries for case in CASES if case.policy == "kara")
MATES = random_prompts([5, 60, 12, 29], seed=4)
Spec = tuple[str, str, str]
"""A kind of checkpoint, a layout and a cache's type."""


def kinds(cases: Iterable[Case]) -> list[Case]:
    """The first of each kind of trigger, and of each way to get queries."""
    found: dict[Any, Case] = {}
    for case in cases:
        if case.policy != LongEntries.name:
            policy = case.make()
            kind = type(policy.event_trigger), policy.recomputed_reduction is None
            found.setdefault(kind, case)
    return list(found.values())


def matrix(
    specs: Iterable[Spec],
    cases: Sequence[Case],
    all_of: Container[Spec] = (),
    slow: Sequence[Spec] = (),
) -> pytest.MarkDecorator:
    """Parametrize by a lab and a case: with all cases ``all_of`` these labs, else with one of each
    kind. The other cases, and all of ``slow`` labs, are slow."""
    params = []
    for spec in (*specs, *slow):
        quick = cases if spec in all_of else kinds(cases) if spec not in slow else []
        for some, marks in ((quick, ()), ([c for c in cases if c not in quick], pytest.mark.slow)):
            labels = tuple(case.label for case in some)
            for case in some:
                name = "-".join((*spec, case.label))
                params.append(pytest.param((spec, labels), case, marks=marks, id=name))
    return pytest.mark.parametrize(("lab", "case"), params, indirect=["lab"])


SPECS = [("llama", "model", "auto"), ("qwen3", "head", "auto"), ("qwen3", "model", "k3v3")]
_LEVELS = [
    *(("llama", "head", "k4v4"), ("qwen3", "layer", "k2v2"), ("qwen3", "model", "k8v4")),
    *(("llama", "head", "int8"), ("qwen3", "layer", "fp8")),
]
OTHERS = [("llama", "layer", "auto"), *_LEVELS]
EACH = matrix(SPECS, CASES, all_of=SPECS[:1], slow=OTHERS)
EACH_KIND = matrix(SPECS, CASES, slow=OTHERS)
"""Of what differs by the kind of event, and not by who is kept."""
IN_LEVELS = matrix(SPECS[2:], CASES, slow=_LEVELS)


@dataclass(frozen=True)
class Run:
    """One request's whole story."""

    tokens: list[int]
    logits: Tensor
    details: KVCacheDetails
    cached: int
    record: Record

    @property
    def events(self) -> list[Event]:
        return self.record.events

    @property
    def choices(self) -> list[Choice]:
        return self.record.choices


def generate(recorder: Recorder, requests: Sequence[tuple[list[int], Any]]) -> list[Run]:
    """Run (prompt, policy) requests together; nobody but the prefix cache holds blocks then."""
    recorder.clear()
    core = recorder.llm.engine.core
    params = [
        SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, kv_policy=policy)
        for _, policy in requests
    ]
    outputs = recorder.llm.generate([ids for ids, _ in requests], params, use_tqdm=False)
    core.scheduler.check_integrity()
    assert core.scheduler.blocks.headroom == core.scheduler.pool.capacity
    return [
        Run(
            output.outputs[0].token_ids,
            torch.stack(recorder.logits[seq_id]),
            output.kv_cache_details,
            output.num_cached_tokens,
            recorder.records[seq_id],
        )
        for output, seq_id in zip(outputs, sorted(recorder.records), strict=True)
    ]


class Lab:
    """One checkpoint, and every run on it that several tests look at."""

    def __init__(
        self,
        directory: Path,
        layout: str,
        form: str,
        cases: Sequence[Case] = CASES,
        log: str = "auto",
        slack: float = 1.0,
        *,
        shares: bool = True,
    ) -> None:
        """``shares``: whether the model's blocks can be shared, and its rows leave the device."""
        self.directory = directory
        self.layout = layout
        self.form = form
        self.cases = {case.label: case for case in cases}
        self.log = log
        self.slack, self.shares = slack, shares
        self.alone = cache(self._alone)
        self.dense = cache(self._dense)
        self.preempted = cache(self._preempted)
        self.chunked = cache(self._chunked)

    def engine(self, **settings: Any) -> Recorder:
        """All heads' queries are logged, so that requests may choose any of the cases."""
        policy = {"name": "snapkv", "budget": 64, "query_dtype": self.log}
        settings = {
            **{"max_num_seqs": 40, "dtype": "float32", "kv_layout": self.layout},
            **{"kv_cache_dtype": self.form, **settings},
        }
        llm = LLM(str(self.directory), policy=policy, skip_tokenizer_init=True, **settings)
        return Recorder(llm, levels=True)

    @property
    def engine_centres(self) -> Any:
        """Where queries point, by the statistics beside the checkpoint."""
        centres: Any = self._one.llm.engine.core.runner.compressor.observer.centres
        return centres.to("cpu")

    @property
    def small_blocks(self) -> int:
        """Tokens in the smallest block that holds a token's queries of all heads too."""
        return 4 if self.form == "auto" else 32 if FORMATS[self.form].few else 16

    @cached_property
    def _model(self) -> PreTrainedModel:
        return load_dense(self.directory)

    @cached_property
    def _one(self) -> Recorder:
        return self.engine(enable_prefix_caching=False)

    def _alone(self, label: str, roomy: bool = False) -> Run:
        case = self.cases[label]
        spec = {**case.spec, **(case.roomy if roomy else {})}
        (run,) = generate(self._one, [(IDS, spec)])
        return run

    def _dense(self, label: str) -> DensePass:
        """What a run alone must equal, given its tokens, kept sets and levels."""
        return self._dense_pass(label, FORMATS.get(self.form))

    def _dense_pass(self, label: str, form: EntryFormat | None) -> DensePass:
        run = self.alone(label)
        how: dict[str, Any] = {"form": form, "held": self.held(run), "intact": self.intact(label)}
        return dense_pass(self._model, IDS + run.tokens[:-1], run.events, **how)

    def intact(self, label: str) -> int:
        """How many of the newest entries each event of a case leaves in their order."""
        return self.cases[label].make().event_trigger.intact

    def recomputed(self, label: str) -> Tensor:
        """The queries that an event computes again: they read all entries as levels."""
        form = FORMATS.get(self.form)
        if form is None or not form.newest:
            return self.dense(label).queries
        return self._dense_pass(label, replace(form, newest=0)).queries

    def levels(self, run: Run) -> dict[int, tuple[Stored | QuantizedVectors, ...]]:
        """What a run stored of every layer's keys and values, [Hkv, T, D]."""
        cache = self._one.llm.engine.core.runner.cache
        kinds = cache.layers.full, sorted(cache.layers.windowed)
        return {
            layer: vectors_of(levels, cache, layer)
            for layers, (of_kind,) in zip(kinds, run.record.levels(), strict=False)
            for layer, levels in zip(layers, of_kind, strict=True)
        }

    def held(self, run: Run) -> dict[int, Vectors] | None:
        """As numbers; ``None``: they are stored as they were computed."""
        if self.form == "auto":
            return None
        spec, stored = self._one.llm.engine.core.runner.model.spec, self.levels(run).items()
        # Our own layers with states hold the dimensions of keys in an order of their own.
        order = slice(None) if spec.delta is None else rotated_order(spec)
        return {
            layer: (keys.widened()[..., order], values.widened())
            for layer, (keys, values) in stored
        }

    @property
    def within(self) -> float:
        """How far numbers may be from those of the dense pass."""
        return 1e-4 * self.slack

    @cached_property
    def crowd(self) -> dict[str, Run]:
        """All cases at once, beside requests of other lengths, in small blocks and chunks.

        Every second one has the same prompt, so the prefix cache has them share its blocks.
        """
        engine = self.engine(block_size=self.small_blocks, max_num_batched_tokens=43)
        cases = self.cases.values()
        mates = [(ids, case.spec) for ids, case in zip(MATES * 9, cases, strict=False)]
        mine = [(IDS, case.spec) for case in cases]
        requests = [one for pair in zip(mates, mine, strict=True) for one in pair]
        runs = generate(engine, requests)[1::2]
        assert any(run.cached for run in runs) == self.shares
        return dict(zip(self.cases, runs, strict=True))

    def _preempted(self, swap_space: int) -> dict[str, Run]:
        """All cases at once, and now and then the newest makes way."""
        engine = self.engine(swap_space=swap_space)
        scheduler = engine.llm.engine.core.scheduler
        preempt_now_and_then(scheduler, np.random.default_rng(0), 0.1)
        runs = generate(engine, [(IDS, case.spec) for case in self.cases.values()])
        assert scheduler.totals.preemptions_total > 5
        assert (scheduler.totals.swaps_total > 2) == bool(swap_space)
        return dict(zip(self.cases, runs, strict=True))

    @cached_property
    def guessed(self) -> dict[str, Run]:
        """All cases at once, in small blocks and chunks; most of what is guessed is right, the
        rest is verified in vain, and now and then the newest makes way."""
        settings = {"block_size": self.small_blocks, "max_num_batched_tokens": 99}
        engine = self.engine(**settings, speculative_config=SPECULATIVE, swap_space=1)
        scheduler = engine.llm.engine.core.scheduler
        preempt_now_and_then(scheduler, np.random.default_rng(0), 0.1)
        labels = list(self.cases)
        answers = [self.alone(label).tokens for label in labels]
        oracle = Oracle(engine.llm, answers.__getitem__, 0.8)
        runs = generate(engine, [(IDS, case.spec) for case in self.cases.values()])
        assert oracle.guessed > oracle.confirmed > 5 * len(labels)
        assert scheduler.totals.preemptions_total > 2
        return dict(zip(labels, runs, strict=True))

    def _chunked(self, chunk: int, hits: bool) -> dict[str, Run]:
        """One case after the other, in chunks of a given size, without and with a cached prompt."""
        engine = self.engine(
            max_num_seqs=1,
            max_num_batched_tokens=chunk,
            max_num_observed_tokens=4096,
            enable_prefix_caching=hits,
            block_size=self.small_blocks,
        )
        if hits:
            generate(engine, [(IDS, "none")])
        runs = {
            label: generate(engine, [(IDS, case.spec)])[0] for label, case in self.cases.items()
        }
        assert any(run.cached for run in runs.values()) == hits
        return runs


@pytest.fixture(scope="module", autouse=True)
def outsider() -> Iterator[None]:
    """``long_entries`` is installed as a plug-in would be."""
    with plug_ins(LongEntries):
        yield


@pytest.fixture(scope="module")
def labs(
    tmp_path_factory: pytest.TempPathFactory, few_newest: None, some_text: None
) -> Callable[[Spec, tuple[str, ...]], Lab]:
    """Each is made once, and holds the runs of its cases."""
    by_label = {case.label: case for case in CASES}

    @cache
    def made(spec: Spec, labels: tuple[str, ...]) -> Lab:
        kind, layout, form = spec
        # Every run of a lab is compared with what the full cache gives.
        cases = [by_label[label] for label in dict.fromkeys(("none-0", *labels))]
        sizes = {"head_dim": 32} if form == "k3v3" else {}  # 16 take as many bytes in 4 bits
        directory = write_checkpoint(kind, tmp_path_factory.mktemp(kind), **sizes)
        # gpt-oss multiplies two projections that grow as they like: so do float32's last bits.
        # qwen3_5 divides by the norm of what its states give, which may be nearly nothing.
        slack = {"gpt-oss": 3.0, "qwen3_5": 20.0}.get(kind, 1.0)
        return Lab(directory, layout, form, cases, slack=slack, shares=kind != "qwen3_5")

    return made


@pytest.fixture
def lab(request: pytest.FixtureRequest, labs: Callable[[Spec, tuple[str, ...]], Lab]) -> Lab:
    return labs(*request.param)


def test_every_policy_has_a_row() -> None:
    """Those that keep unequal counts are in test_uneven_engine.py."""
    even = {n for n in registry.policy_names() if policy_is_even(n)}
    assert {case.policy for case in CASES} == even
    assert len({case.label for case in CASES}) == len(CASES)
    assert {case.policy for case in CASES if case.roomy} == even - {"none"}


def policy_is_even(name: str) -> bool:
    return registry.policy_class(name).granularity is Granularity.MODEL


@EACH
def test_kept_sets_and_counts(lab: Lab, case: Case) -> None:
    """Sorted, unique, in range; the protected ones are there; exactly as many as promised."""
    run = lab.alone(case.label)
    assert [(event.seen, event.held.shape[2]) for event in run.events] == case.events
    before = [0, *(held for _, held in case.events)]
    few = lab.form in FORMATS and FORMATS[lab.form].few
    for event, last_seen, last_held in zip(
        run.events, [0, *(seen for seen, _ in case.events)], before, strict=False
    ):
        assert event.before == last_held + event.seen - last_seen
        assert (np.diff(event.held, axis=2) > 0).all()
        assert event.held.min() >= 0 and event.held.max() < event.seen
        # Few bits keep the first entry whatever a policy says: here, in place of one of the newest.
        first = max(case.first, int(few))
        last = min(case.last, event.held.shape[2] - first)
        assert (event.held[..., :first] == np.arange(first)).all()
        newest = np.arange(event.seen - last, event.seen)
        assert (event.held[..., event.held.shape[2] - last :] == newest).all()
        leaders = np.arange(len(event.held)) // case.shared_by * case.shared_by
        assert (event.held == event.held[leaders]).all()


@EACH
def test_entries_are_copied_bit_for_bit(lab: Lab, case: Case) -> None:
    run = lab.alone(case.label)
    assert len(run.record.copied) == len(case.events) and all(run.record.copied)


@IN_LEVELS
def test_levels_are_those_of_the_rule(lab: Lab, case: Case) -> None:
    """Bit for bit those of what the reference computes, in each layer from the levels of those
    below: of nearly all vectors, and of the others once their numbers are moved towards what is
    stored, by as little as float32 may be off. So these lie in the middle of two levels, or the
    ends of their groups are beside a bfloat16 number."""
    run, exact, same = lab.alone(case.label), lab.dense(case.label).exact, []
    for layer, stored in lab.levels(run).items():
        for mine, x in zip(stored, exact[layer], strict=True):
            same.append(equal_vectors(mine, again(mine, x)))
            near = 1e-5 * x.abs().amax(dim=-1, keepdim=True)
            moved = x + (mine.widened() - x).clamp(-near, near)
            assert (same[-1] | equal_vectors(mine, again(mine, moved))).all()
    assert torch.stack(same).float().mean() > 0.99


def again(mine: Stored | QuantizedVectors, x: Tensor) -> Stored | QuantizedVectors:
    """As numbers [Hkv, T, D] have to be stored."""
    return mine.again(x) if isinstance(mine, Stored) else quantize(x, mine.form)


def equal_vectors(a: Stored | QuantizedVectors, b: Stored | QuantizedVectors) -> Tensor:
    """Which vectors are stored alike, bool [...]."""
    parts = zip(a.parts, b.parts, strict=True)
    return torch.stack([(one == other).all(dim=-1) for one, other in parts]).all(dim=0)


@EACH
def test_no_place_goes_to_a_worse_one(lab: Lab, case: Case) -> None:
    for choice in lab.alone(case.label).choices:
        assert choice.scores.isfinite().any(dim=-1).all() and not choice.scores.isnan().any()
        competing = choice.scores
        if case.make().kept_scores:  # the newest are scored too, but do not compete
            competing = competing[..., : int(choice.plan.window_len[0]) - case.last]
        assert case.optimal(competing, choice.kept)


@EACH
def test_with_room_for_everything_nothing_changes(lab: Lab, case: Case) -> None:
    if not case.roomy and case.policy != "none":
        pytest.skip("another case of this policy has room for everything")
    run, full = lab.alone(case.label, True), lab.alone("none-0")
    assert run.details.compactions == 0
    assert run.tokens == full.tokens and torch.equal(run.logits, full.logits)


@EACH
def test_mates_chunks_and_blocks_do_not_matter(lab: Lab, case: Case) -> None:
    same(lab.alone(case.label), lab.crowd[case.label], lab.within)


@EACH
def test_a_preempted_sequence_replays_its_events(lab: Lab, case: Case) -> None:
    same(lab.alone(case.label), lab.preempted(0)[case.label], lab.within)


@EACH_KIND
def test_a_preempted_sequence_comes_back_from_host_memory(lab: Lab, case: Case) -> None:
    same(lab.alone(case.label), lab.preempted(1)[case.label], lab.within)


@EACH
def test_guesses_do_not_matter(lab: Lab, case: Case) -> None:
    """Tokens, logits and kept sets; right guesses are entries like others, wrong ones are gone."""
    same(lab.alone(case.label), lab.guessed[case.label], lab.within)


@pytest.mark.parametrize("chunk", [16, *slow(4096, 1, WINDOW - 1)])
@EACH
def test_chunks_do_not_matter(lab: Lab, case: Case, chunk: int) -> None:
    same(lab.alone(case.label), lab.chunked(chunk, False)[case.label], lab.within)


@pytest.mark.parametrize("chunk", [16, *slow(4096, 1, WINDOW - 1)])
@EACH_KIND
def test_hits_do_not_matter(lab: Lab, case: Case, chunk: int) -> None:
    same(lab.alone(case.label), lab.chunked(chunk, True)[case.label], lab.within)


@EACH
def test_logical_positions_go_on(lab: Lab, case: Case) -> None:
    details = lab.alone(case.label).details
    seen, held = [(0, 0), *case.events][-1]
    assert details.logical_tokens == SEEN and details.compactions == len(case.events)
    assert details.held_tokens == SEEN - seen + held == SEEN - details.evicted_tokens


@EACH
def test_logits_are_those_of_dense_attention_over_the_kept_set(lab: Lab, case: Case) -> None:
    run, expected = lab.alone(case.label), lab.dense(case.label).logits[PROMPT - 1 :]
    torch.testing.assert_close(run.logits, expected, atol=lab.within, rtol=lab.within)


@EACH
def test_scores_are_those_of_the_true_queries_and_keys(lab: Lab, case: Case) -> None:
    run, dense, policy = lab.alone(case.label), lab.dense(case.label), case.make()
    layers, kv_heads, _, dim = dense.keys.shape
    reduction = policy.query_reduction or policy.recomputed_reduction
    queries = dense.queries
    if policy.recomputed_reduction is not None:
        queries = lab.recomputed(case.label)
    if reduction == "group_mean":
        queries = queries.unflatten(1, (kv_heads, -1)).mean(2)
    leaders = sorted(set(policy.leaders(layers)))
    held, seen = np.zeros((layers, kv_heads, 0), np.int32), 0
    earlier: Tensor | None = None
    for event, choice in zip(run.events, run.choices, strict=True):
        new = np.arange(seen, event.seen)
        held = np.concatenate([held, np.broadcast_to(new, (*held.shape[:2], len(new)))], axis=2)
        plan = choice.plan
        for window, scores in enumerate(choice.scores):
            offset = window * int(plan.window_len[0])
            start = int(plan.region_start[0]) + offset
            at = torch.as_tensor(held[..., start : start + int(plan.window_len[0])]).long()
            keys = dense.keys.gather(2, at[..., None].expand(-1, -1, -1, dim))
            places = policy.query_places(int(plan.num_queries[0]))
            asked = [int(plan.query_start[0]) + offset + place for place in places]
            true_queries = queries[None, leaders][..., asked, :]
            obs = Observation(true_queries, keys[None, leaders], dim**-0.5, earlier)
            if policy.uses_values:
                values = dense.values.gather(2, at[..., None].expand(-1, -1, -1, dim))
                obs = replace(obs, values=values[None, leaders])
            if policy.uses_centres:
                centres = lab.engine_centres
                obs = replace(obs, centres=centres, positions=torch.tensor([event.seen]))
            if dense.sinks is not None:
                sinks = dense.sinks.unflatten(1, (queries.shape[1], -1)).mean(2)[leaders]
                obs = replace(obs, sinks=sinks[None])
            torch.testing.assert_close(
                policy.score(obs)[0], scores, atol=lab.within, rtol=lab.within
            )
            if policy.kept_scores:
                earlier = scores.gather(-1, choice.kept[window])[None]
        held, seen = event.held, event.seen


def same(a: Run, b: Run, within: float = 1e-4) -> None:
    """Tokens, logits and kept sets; bit for bit, the levels of layers that see all tokens. (Of
    those with windows a cached prefix brings the newest tokens alone.)"""
    assert a.tokens == b.tokens
    torch.testing.assert_close(a.logits, b.logits, atol=within, rtol=within)
    assert [event.seen for event in a.events] == [event.seen for event in b.events]
    for one, other in zip(a.events, b.events, strict=True):
        assert np.array_equal(one.held, other.held)
    for levels in [*zip(a.record.levels(), b.record.levels(), strict=True)][:1]:
        assert torch.equal(*levels)
