"""Models some of whose layers keep states: transformers' logits and tokens, however their rows are
computed, beside whom, and after whatever has happened to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvserve import SamplingParams
from kvserve.engine.models.recurrent import Recurrent
from tests.checkpoints import random_prompts
from tests.engine.models.decoding import check_parity, make
from tests.engine.models.hybrids import FAMILIES, expected, write_hybrid
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import slow

PROMPTS = random_prompts([5, 60, 1, 33, 130, 64, 7, 90])
TOKENS = 64
DELTA = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
"""Their gated norms divide by what is nearly nothing in a random model."""
QUICK = ["qwen3_5_text", "falcon_h1", "lfm2"]
"""One of each kind of state: the delta rule, Mamba 2 beside attention, a convolution alone."""
TWO_FORMS = "nemotron_h"
"""Its time step has a least value in calls of many tokens, and none in those of one."""

every_family = pytest.mark.parametrize(
    "kind", [*QUICK, *slow(*(kind for kind in FAMILIES if kind not in QUICK))]
)


def within(kind: str) -> float:
    return 2e-3 if kind in DELTA else 1e-4


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.fixture
def directory(
    kind: str, written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if kind not in written:
        written[kind] = write_hybrid(kind, tmp_path_factory.mktemp(kind))
    return written[kind]


@every_family
def test_a_crowd_of_unequal_rows(kind: str, directory: Path) -> None:
    # The one token of a prompt is a call of many there, and here a step.
    prompts = [ids for ids in PROMPTS if len(ids) > 1 or kind != TWO_FORMS]
    wanted = expected(directory, prompts, TOKENS)
    llm = check_parity(directory, prompts, wanted, within(kind), max_num_seqs=8)
    assert isinstance(llm.engine.core.runner.model, Recurrent)
    assert llm.stats().steps_total < 80, "they decode together"


@pytest.mark.parametrize("chunk", [7, 64])
@every_family
def test_chunks(kind: str, chunk: int, directory: Path) -> None:
    """Each alone, so that its chunks are those of the reference."""
    prompts = [PROMPTS[at] for at in (1, 4)]
    wanted = expected(directory, prompts, 16, chunk)
    settings = {"max_num_batched_tokens": chunk, "max_num_seqs": 1}
    check_parity(directory, prompts, wanted, within(kind), **settings)


@every_family
def test_what_happens_beside_a_row_and_to_it(kind: str, directory: Path) -> None:
    """Chunks beside decodes, aborts, and rows that are preempted and computed again."""
    wanted = expected(directory, PROMPTS[:5], 32)
    llm = make(directory, max_num_batched_tokens=48, max_num_seqs=6)
    core = llm.engine.core
    if kind != TWO_FORMS:
        preempt_now_and_then(core.scheduler, np.random.default_rng(0), 0.1)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    for at, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(at), prompt, params)
    found: dict[str, list[int]] = {}
    for step in range(500):
        if step in (3, 9, 14):  # in its prompt, and as it decodes
            llm.engine.abort_request(str({3: 7, 9: 5, 14: 6}[step]))
        for output in llm.engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        core.scheduler.check_integrity()
        if len(found) >= 5 and not core.scheduler.has_work:
            break
    assert bool(llm.stats().preemptions_total) == (kind != TWO_FORMS)
    assert [found[str(at)] for at in range(5)] == [one.token_ids for one in wanted]
