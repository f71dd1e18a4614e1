"""A small checkpoint that the benchmark commands can run on, and the commands themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvserve.server.cli import commands as cli
from tests.checkpoints import write_tokenizer

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory)
    return directory


def write_byte_model(directory: Path) -> None:
    """config.json, a byte-level tokenizer and a chat template; weights come from `dummy`."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPE))
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)


Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def bench(model_dir: Path, tmp_path: Path) -> Bench:
    """Run a command on the checkpoint; returns its exit status and what it saved."""

    def run(command: str, *flags: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "results" / "run.json"
        model = ("--model", str(model_dir), "--load-format", "dummy", "--dtype", "float32")
        status: int = cli.run([*command.split(), *model, "--save-result", str(file), *flags])
        return status, json.loads(file.read_text()) if file.exists() else {}

    return run
