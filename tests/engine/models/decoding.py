"""Random checkpoints of any architecture of transformers, and what engines and it make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from kvserve import LLM, SamplingParams
from tests.checkpoints import Generated, edited_tensors, random_prompts
from tests.engine.recorder import Recorder

PROMPTS = random_prompts([5, 60, 1, 33])
TOKENS = 32
SHAPE: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "max_position_embeddings": 512},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
}
GQA = {**SHAPE, "num_key_value_heads": 2}


def write(kind: Any, config: Any, directory: Path) -> Path:
    """A checkpoint of ``kind``, one of transformers' ``AutoModelFor...``; norms keep activations in
    range, so that greedy tokens are stable."""
    torch.manual_seed(0)
    model = kind.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.2)
        else:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def expected(kind: Any, directory: Path, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    """What transformers goes on with, by passes over whole texts."""
    model = kind.from_pretrained(directory, attn_implementation="eager")
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(TOKENS):
            logits = model(input_ids=ids, use_cache=False).logits[0, -1]
            ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def make(directory: Path | str, **settings: Any) -> LLM:
    """An engine of a checkpoint without a tokenizer, by default in float32."""
    return LLM(str(directory), **{"dtype": "float32", "skip_tokenizer_init": True, **settings})


def tokens(
    llm: LLM, prompts: Sequence[Any] = PROMPTS, count: int = TOKENS, **changes: Any
) -> list[list[int]]:
    """Greedy answers of ``count`` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **changes)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def answers_beside(
    llm: LLM, prompts: Sequence[list[int]], count: int, aborted: Mapping[int, int]
) -> list[list[int]]:
    """Greedy answers of ``count`` tokens to the ``prompts`` that are not ``aborted``, each of these
    by the step that aborts it; all integrity is checked behind each step."""
    add_all(llm, prompts, count)
    found: dict[int, list[int]] = {}
    step = 0
    while llm.engine.has_unfinished_requests:
        if step in aborted:
            llm.engine.abort_request(str(aborted[step]))
        for output in llm.engine.step():
            if output.outputs[0].finish_reason == "length":
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
        llm.engine.core.scheduler.check_integrity()
        step += 1
    assert found.keys() == {*range(len(prompts))} - {*aborted.values()}
    return [found[at] for at in sorted(found)]


def check_away(
    directory: Path, prompts: Sequence[list[int]], expected: Sequence[Generated], within: float
) -> None:
    """The logits of rows that go to host memory in every seventh step, as if compressed."""
    llm = make(directory, max_num_seqs=4)
    recorder, scheduler = Recorder(llm), llm.engine.core.scheduler
    add_all(llm, prompts, len(expected[0].token_ids))
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        if scheduler.totals.steps_total % 7 == 3 and scheduler.rows.num_rows > 1:
            scheduler.rows.compactions[: scheduler.rows.num_rows] = 1
            scheduler.departures.preempt()
        scheduler.check_integrity()
    assert llm.stats().swaps_total == llm.stats().preemptions_total > 3
    for i, one in enumerate(expected):
        logits = torch.stack(recorder.logits[i])
        torch.testing.assert_close(logits, one.logits, atol=within, rtol=0.0)


def add_all(llm: LLM, prompts: Sequence[list[int]], count: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    for at, prompt in enumerate(prompts):
        llm.engine.add_request(str(at), prompt, params)


def check_parity(
    directory: Path,
    prompts: list[list[int]],
    expected: list[Generated],
    within: float = 2e-4,
    **settings: Any,
) -> LLM:
    """The same tokens, and nearly the logits they came from, for the prompts as a batch.

    Random weights amplify the last bit of a norm: the closest case differs by 1.4e-4. Of several
    ranks the tokens alone are compared.
    """
    llm = make(directory, **settings)
    recorder = Recorder(llm) if settings.get("tensor_parallel_size", 1) == 1 else None
    assert tokens(llm, prompts, len(expected[0].token_ids)) == [one.token_ids for one in expected]
    if recorder is not None:
        for i, one in enumerate(expected):
            logits = torch.stack(recorder.logits[i])
            torch.testing.assert_close(logits, one.logits, atol=within, rtol=0.0)
    return llm


def wrap(kind: str, architecture: str, directory: Path) -> None:
    """Rewrite a checkpoint as one of the model ``kind`` that has it as its text part."""
    with edited_tensors(directory) as stored:
        for name in [name for name in stored if name.startswith("model.")]:
            stored[f"model.language_model.{name[6:]}"] = stored.pop(name)
        for other in ("vision_tower", "embed_vision", "audio_tower", "visual"):
            stored[f"model.{other}.weight"] = torch.zeros(2, 2)
    text = json.loads((directory / "config.json").read_text())
    whole = AutoConfig.for_model(kind).to_dict()
    whole |= {"architectures": [architecture], "text_config": text}
    (directory / "config.json").write_text(json.dumps(whole, default=str))


def row_of(llm: LLM, name: str) -> tuple[str, ...]:
    """The start-up table's row of this name."""
    (row,) = [row for row in llm.engine.core.described().summary if row[0] == name]
    return row
