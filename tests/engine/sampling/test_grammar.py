"""Structured output: what comes out matches, batch by batch, and reasoning stays free."""

from __future__ import annotations

import re
import threading
import traceback
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvserve import LLM, SamplingParams
from kvserve.config import EngineConfig
from kvserve.engine.core.core_loop import GrammarQueue
from kvserve.engine.messages import NewSequence
from kvserve.engine.sampling import grammar
from kvserve.engine.sampling.grammar import GrammarCompiler, Matcher, SequenceGrammar
from kvserve.late import Made
from kvserve.log import RequestError
from kvserve.sampling_params import StructuredOutput
from tests.checkpoints import write_checkpoint, write_tokenizer
from tests.counting import lines_run
from tests.waiting import WAIT


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    # 300 tokens, of which the tokenizer knows 259: the rest must never be allowed.
    directory = write_checkpoint("llama", tmp_path_factory.mktemp("model"), vocab_size=300)
    write_tokenizer(directory)
    return LLM(str(directory), dtype="float32", max_model_len=500)


def test_json_object(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"json_object": True}, max_tokens=60, seed=1)
    (output,) = llm.generate("go", params, use_tqdm=False)
    assert output.outputs[0].text.startswith("{")


def test_neighbours_are_free_and_unchanged(llm: LLM) -> None:
    free = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
    (alone,) = llm.generate("hello", free, use_tqdm=False)
    bound = SamplingParams(structured_outputs={"choice": ["left", "right"]}, max_tokens=30)
    mixed = llm.generate(["hello"] * 3, [bound, free, bound], use_tqdm=False)
    assert mixed[1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert {mixed[i].outputs[0].text for i in (0, 2)} <= {"left", "right"}


def test_a_grammar_survives_preemption(llm: LLM) -> None:
    directory = llm.config.model.model
    small = LLM(directory, dtype="float32", max_model_len=500, num_gpu_blocks_override=16)
    params = SamplingParams(structured_outputs={"regex": "[a-z]{100}"}, max_tokens=200)
    outputs = small.generate(["abc"] * 4, params, use_tqdm=False)
    assert small.stats().preemptions_total > 0
    assert all(re.fullmatch("[a-z]{100}", out.outputs[0].text) for out in outputs)


def compiler(llm: LLM, **settings: Any) -> GrammarCompiler:
    core = llm.engine.core
    config = EngineConfig.from_flat(model=core.info.model_path, **settings)
    return GrammarCompiler(config.model, core.info)


def test_grammars_are_compiled_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = compiler(llm)
    wanted = StructuredOutput.parse({"regex": "ab*"})
    _, first, second = (grammars.compile(wanted) for _ in range(3))
    assert len(grammars._compiled) == 1
    [a, b, eos] = [llm.engine.core.info.eos_token_ids[0]] * 3
    assert llm.tokenizer is not None
    a, b = llm.tokenizer.encode("ab", add_special_tokens=False)
    assert first.accept(a)
    masks = np.zeros((2, 10), np.int32)
    first.fill(masks[0])
    second.fill(masks[1])
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert set(np.flatnonzero(allowed[0])) == {b, eos}
    assert set(np.flatnonzero(allowed[1])) == {a}


def test_what_grammars_take_is_given_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bombs left 644 MiB: some are refused, and some compile and are never asked for again."""
    grows, trims, mib = list[int](), list[int](), 2**20

    def resident_bytes(held: list[int] = [0]) -> int:  # noqa: B006
        held[0] += grows[-1]
        return held[0]

    def fail(wanted: StructuredOutput) -> Any:
        raise RequestError("no")

    monkeypatch.setattr(grammar, "resident_bytes", resident_bytes)
    monkeypatch.setattr(grammar, "trim_memory", lambda: trims.append(grows[-1]))
    grammars = compiler(llm)
    for grows_by, kept in ((mib, 32), (9 * mib, 0)):
        grows.append(grows_by)
        grammars._compiled.clear()
        for i in range(40):
            grammars.compile(StructuredOutput.parse({"regex": f"a{{{i + 1}}}"}))
        assert len(grammars._compiled) == kept
    assert not trims
    monkeypatch.setattr(grammars, "_make", fail)
    for grows_by in (mib, 100 * mib):
        grows.append(grows_by)
        with pytest.raises(RequestError) as refused:
            grammars.compile(StructuredOutput.parse({"regex": "b"}))
        frames = list(traceback.walk_tb(refused.value.__traceback__))
        assert frames[-1][0].f_code.co_name == "compile" and refused.value.__context__ is None
    assert trims == [100 * mib]
    for _ in range(64):
        grammars.count_ended()
    assert len(trims) == 2


# ---- masks: bits on the host, unpacked for their own rows on the device ------------------------

VOCABULARY = 128_256


class Only(Matcher):
    """A matcher that allows one token."""

    def __init__(self, token: int) -> None:
        self._token = token

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        mask[:] = 0
        mask.view(np.uint8)[self._token // 8] = 1 << self._token % 8

    def accept(self, token: int) -> bool:
        return token == self._token


def test_rows_without_a_grammar_stay_as_they_are() -> None:
    logits = torch.randn(4, 75)
    before = logits.clone()
    none = (None, None)
    grammars = [(at, SequenceGrammar(Only(token), none, ())) for at, token in ((3, 74), (0, 9))]
    masked = SequenceGrammar.allowed(grammars, logits).apply(logits)
    expected = torch.full_like(logits, -torch.inf)
    expected[3, 74], expected[0, 9] = logits[3, 74], logits[0, 9]
    expected[1:3] = logits[1:3]
    assert torch.equal(masked, expected) and torch.equal(logits, before)


def test_the_host_makes_and_sends_a_bit_per_token_of_a_grammar() -> None:
    """However many other rows there are, and in no loop over the tokens."""
    grammars = [(200, SequenceGrammar(Only(5), (None, None), ()))]

    def make(vocabulary: int) -> None:
        masks = SequenceGrammar.allowed(grammars, torch.zeros(1, 1).expand(256, vocabulary))
        assert masks.bits.nbytes == vocabulary // 8

    make(VOCABULARY)
    assert lines_run(lambda: make(VOCABULARY)) == lines_run(lambda: make(64))


# ---- the queue: clients' grammars are compiled in turn -----------------------------------------


class NotingCompiler:
    """Notes the order; the first grammar waits until all are queued."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.queued = threading.Event()

    def compile(self, wanted: StructuredOutput) -> Any:
        assert self.queued.wait(WAIT)
        self.order.append(wanted.value)
        return object()


def test_one_client_with_many_makes_others_wait_for_one() -> None:
    compiler = NotingCompiler()
    queue = GrammarQueue(Made(lambda: cast(GrammarCompiler, compiler)))
    sent = [(f"a{i}", "a") for i in range(50)] + [("b0", "b"), ("c0", "c"), ("b1", "b")]
    new = NewSequence(0, "r", [1], 1, [], 1.0, 1.0, 0, 0.0, None, 0, 0, None, None)
    for seq_id, (value, client) in enumerate(sent):
        queue.add(replace(new, seq_id=seq_id, client=client), StructuredOutput("regex", value))
    queue.drop([1])  # who leaves costs nothing
    compiler.queued.set()
    while queue:
        queue.take(1.0)
    queue.close()
    assert len(compiler.order) == len(sent) - 1 and "a1" not in compiler.order
    assert max(compiler.order.index(value) for value in ("b0", "c0")) <= 3
    assert compiler.order.index("b1") <= 6
