"""Run in lm-eval's environment: one task over each of its API models; scores and answers as JSON.

usage: lm_eval_client.py BASE_URL MODEL DOCUMENTS.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lm_eval

base_url, model, documents = sys.argv[1:]
COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": documents}},
    "test_split": "test",
    "num_fewshot": 0,
}
CHOOSE = {
    **COMMON,
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{target}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
ANSWER = {
    **COMMON,
    "task": "answer",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": [";"], "max_gen_toks": 12, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}


def run(kind: str, path: str, task: dict[str, Any], **settings: Any) -> Any:
    server = {"base_url": f"{base_url}/v1/{path}", "model": model, "num_concurrent": 4}
    done = lm_eval.simple_evaluate(model=kind, model_args=server, tasks=[task], **settings)
    name, metric = task["task"], task["metric_list"][0]["metric"]
    samples = sorted(done["samples"][name], key=lambda sample: sample["doc_id"])
    return {
        "score": done["results"][name][f"{metric},none"],
        "answers": [[part[0] for part in sample["resps"]] for sample in samples],
    }


sys.stdout.write(
    json.dumps(
        {
            "choose": run("local-completions", "completions", CHOOSE),
            "answer": run(
                "local-chat-completions", "chat/completions", ANSWER, apply_chat_template=True
            ),
        }
    )
)
