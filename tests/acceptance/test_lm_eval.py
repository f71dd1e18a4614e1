"""lm-eval over HTTP scores what ``LLM.generate`` scores."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvserve import LLM, SamplingParams
from tests.acceptance.conftest import RunClient
from tests.server.real_server import MODEL, Server

pytestmark = pytest.mark.slow
NAMES = ("Kevin", "Rachel", "Adam", "Helen", "Daisy", "Thomas", "Maria", "Carl")


def documents() -> list[dict[str, Any]]:
    """Sums with four choices; every third target is wrong, so that the score says something."""
    rng = random.Random(0)
    docs = []
    for i in range(12):
        (a, b, c), x, y = rng.sample(NAMES, 3), rng.randint(0, 9), rng.randint(0, 9)
        question = f"Let {a}{x}; {b}{y}; {c}= {a}+ {b}; Find {c}"
        steps, result = f" {c}= {a}{x}+ {b}{y}, {c}", (x + y) % 10
        choices = [str((result + k) % 10) for k in (0, 1, 2, 5)]
        target = 0 if i % 3 else 1
        docs.append(
            {
                "question": question,
                "context": f"<|user|> {question}<|assistant|>{steps}",
                "choices": choices,
                "target": target,
                "answer": f"{steps}{choices[target]}",
            }
        )
    return docs


def test_both_models(server: Server, run_client: RunClient, tmp_path: Path) -> None:
    docs = documents()
    path = tmp_path / "documents.json"
    path.write_text(json.dumps(docs))
    found = run_client("lm_eval_client", server.url, MODEL, str(path))

    llm = LLM(MODEL, dtype="float32")
    chosen = []
    for doc, scored in zip(docs, found["choose"]["answers"], strict=True):
        likelihoods = [_likelihood(llm, doc["context"], choice) for choice in doc["choices"]]
        assert [value for value, _ in scored] == pytest.approx(likelihoods, abs=1e-3)
        chosen.append(likelihoods.index(max(likelihoods)) == doc["target"])
    assert found["choose"]["score"] == pytest.approx(sum(chosen) / len(chosen))
    assert 0.0 < found["choose"]["score"] < 1.0

    params = SamplingParams(temperature=0.0, max_tokens=12, stop=";")
    conversations = [[{"role": "user", "content": doc["question"]}] for doc in docs]
    texts = [out.outputs[0].text for out in llm.chat(conversations, params, use_tqdm=False)]
    assert [answer for [answer] in found["answer"]["answers"]] == texts
    right = [text == doc["answer"] for text, doc in zip(texts, docs, strict=True)]
    assert found["answer"]["score"] == pytest.approx(sum(right) / len(right))
    assert 0.0 < found["answer"]["score"] < 1.0


def _likelihood(llm: LLM, context: str, continuation: str) -> float:
    assert llm.tokenizer is not None
    whole = llm.tokenizer.encode(context + continuation, add_special_tokens=False)
    known = len(llm.tokenizer.encode(context, add_special_tokens=False))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([whole], params, use_tqdm=False)
    entries = output.prompt_logprobs
    assert entries is not None
    return sum(
        entry[token].logprob
        for token, entry in zip(whole[known:], entries[known:], strict=True)
        if entry is not None
    )
