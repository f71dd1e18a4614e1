"""How many policies may be in use at once: the server's own and ``none`` always, 32 others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvserve import LLM
from kvserve.engine.core.request_policies import REMEMBERED
from kvserve.engine.messages import NewSequence
from kvserve.engine.runner.plan import EnginePlan
from kvserve.log import RequestError
from kvserve.server.state.errors import as_api_error

SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 64, "max_model_len": 256}
PLAIN = NewSequence(0, "0", [5, 6, 7], 4, [], 0.0, 1.0, 0, 0.0, None, 0, 0, None, None)


def ask(llm: LLM, seq_id: int, policy: Any) -> None:
    llm.engine.core.add(replace(PLAIN, seq_id=seq_id, request_id=str(seq_id), kv_policy=policy))


@pytest.mark.parametrize("own", ["none", {"name": "keydiff", "budget": 99}])
def test_the_33rd_has_to_wait_and_the_servers_own_never(llama_dir: Path, own: Any) -> None:
    llm = LLM(str(llama_dir), policy=own, **SETTINGS)
    specs = [{"name": "streaming_llm", "budget": 20 + i} for i in range(REMEMBERED + 1)]
    for i, spec in enumerate(specs[:-1]):
        ask(llm, i, spec)
    with pytest.raises(RequestError, match="32 different policies") as refused:
        ask(llm, 100, specs[-1])
    error = as_api_error(refused.value)
    assert error.status_code == 429 and error.code == "too_many_policies"
    assert error.headers == {"Retry-After": "1"}
    for i, always in enumerate((None, "none", own, specs[0])):
        ask(llm, 200 + i, always)
    numbers = {seq.policy_id for seq in llm.engine.core._sequences}
    assert len(numbers) == REMEMBERED + (1 if own == "none" else 2)
    llm.engine.core.abort([0, 203])
    ask(llm, 101, specs[-1])


def test_scores_have_a_bound_that_names_the_field(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 MiB for all rows, or what the server's own policy takes."""
    llm = LLM(str(llama_dir), policy={"name": "h2o", "budget": 16}, **SETTINGS)
    monkeypatch.setattr(EnginePlan, "most_kept_scores", 100)
    ask(llm, 0, {"name": "h2o", "budget": 100})
    with pytest.raises(RequestError, match="memory for 100") as refused:
        ask(llm, 1, {"name": "h2o", "budget": 101})
    assert refused.value.param == "kv_policy.budget"


def test_scores_are_given_back(llama_dir: Path) -> None:
    llm = LLM(str(llama_dir), policy={"name": "h2o", "budget": 16}, **SETTINGS)
    core = llm.engine.core
    before = core.stats().scoring_workspace_bytes
    for budget in (8, 12, 10):
        spec = {"name": "h2o", "budget": budget}
        core.add(replace(PLAIN, seq_id=budget, token_ids=list(range(5, 45)), kv_policy=spec))
    held = 0
    while core.has_work:
        core.step()
        held = max(held, core.stats().scoring_workspace_bytes - before)
    heads = 3 * 2  # layers, KV heads
    assert held == 4 * SETTINGS["max_num_seqs"] * heads * 12
    assert core.stats().scoring_workspace_bytes == before
