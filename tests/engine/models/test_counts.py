"""Counts of a config.json that no model has: refused by name, before anything is made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from kvserve.config import EngineConfig, ModelConfig
from kvserve.engine.core.build import build_engine
from kvserve.engine.frontend.llm_engine import load_tokenizer
from kvserve.engine.models import loader
from kvserve.engine.models.counts import Held, check_counts
from kvserve.engine.models.implementation import choose_spec
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer
from kvserve.log import ConfigError
from tests.checkpoints import edit_config, write_checkpoint, write_tokenizer
from tests.engine.models.decoding import make
from tests.gguf_files import write_gguf

HUGE = (10**9, 10**12, 2**70)
COUNTS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_size", "intermediate_size", "vocab_size"),
)


def config_of(directory: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(model=str(directory), **settings)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "config.json"),
        ("[]", "config.json"),
        ('{"architectures": ["T5Model"]}', "T5Model"),
        ('{"architectures": ["LlamaForCausalLM"], "model_type": "nothing"}', "num_hidden_layers"),
    ],
)
def test_a_configs_fault_is_not_the_tokenizers(text: str, named: str, tmp_path: Path) -> None:
    """Whose library reads it too."""
    directory = write_tokenizer(write_checkpoint("llama", tmp_path))
    (directory / "config.json").write_text(text)
    for read in (load_tokenizer, lambda config: choose_spec(directory, config)):
        with pytest.raises(ConfigError, match=named) as refused:
            read(config_of(directory))
        assert "--tokenizer" not in str(refused.value)


@pytest.mark.parametrize("format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", COUNTS),
        ("qwen3-moe", ("num_experts", "moe_intermediate_size", "num_hidden_layers")),
        ("mixtral", ("num_local_experts",)),
        ("gpt-oss", ("num_local_experts",)),
    ],
)
def test_counts_are_bounded_by_the_files(
    kind: str, names: tuple[str, ...], format: Any, tmp_path: Path
) -> None:
    """10^9 layers were 47 seconds and gigabytes of lists before anything was said."""
    directory = write_checkpoint(kind, tmp_path)
    for name in names:
        before = (directory / "config.json").read_text()
        for value in HUGE[format == "dummy" :]:
            edit_config(directory, **{name: value})
            with pytest.raises(ConfigError, match=f"config.json sets {name} to {value}"):
                choose_spec(directory, config_of(directory, load_format=format))
            with pytest.raises(ConfigError, match=f"sets {name} to"):
                load_tokenizer(config_of(directory, load_format=format))
        (directory / "config.json").write_text(before)


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"vocab_size": 10**5}, "vocab_size"),
        ({"hidden_size": 10**5}, "hidden_size"),
        ({"intermediate_size": 10**5}, "intermediate_size"),
        ({"head_dim": 10**5}, r"num_attention_heads \* head_dim"),
        ({"num_attention_heads": 16}, r"num_attention_heads \* head_dim"),
        ({"num_hidden_layers": 25}, "model.layers.10"),
    ],
)
def test_shapes_are_compared_before_matrices_are_made(
    field: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint("llama", tmp_path)
    edit_config(directory, **field)

    def without_memory(spec: ModelSpec, dtype: torch.dtype, device: str, *more: Any) -> Transformer:
        assert device == "meta"
        return Transformer(spec, dtype, device, *more)

    monkeypatch.setattr(loader, "Transformer", without_memory)
    with pytest.raises(ConfigError, match=named):
        make(directory)


def test_parts_and_overrides_are_looked_at(tmp_path: Path) -> None:
    held = Held.of([[8, 4], [6, 8, 4]], 100)
    check_counts({"num_hidden_layers": 2, "num_experts": 6, "vocab_size": 800}, held, "a")
    for name, value in {"n_layer": 3, "n_routed_experts": 7, "vocab_size": 801}.items():
        with pytest.raises(ConfigError, match=f"sets {name} to {value}, and its files hold"):
            check_counts({"text_config": {"a": {name: value}}}, held, "a")
    deep: dict[str, Any] = {"num_layers": 10**9}
    for _ in range(10_000):
        deep = {"a": deep}
    with pytest.raises(ConfigError, match="num_layers"):
        check_counts(deep, held, "a")
    directory = write_checkpoint("llama", tmp_path)
    overrides = {"num_hidden_layers": 10**9}
    with pytest.raises(ConfigError, match="--hf-overrides sets num_hidden_layers"):
        choose_spec(directory, config_of(directory, hf_overrides=overrides))


def test_a_gguf_file_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint("llama", tmp_path)
    set_count: Callable[..., None] = gguf.GGUFWriter.add_block_count
    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", lambda w, _: set_count(w, 10**9))
    file = write_gguf(directory, tmp_path / "a.gguf", "llama")
    with pytest.raises(ConfigError, match=r"a.gguf sets num_hidden_layers to 1000000000, and its"):
        choose_spec(file, ModelConfig(model=str(file)))


def test_a_context_that_no_memory_holds(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    edit_config(directory, max_position_embeddings=2 * 10**9)
    with pytest.raises(ConfigError, match=r"--max-model-len: .* of 2000000000 tokens"):
        build_engine(EngineConfig.from_flat(model=str(directory)))
    edit_config(directory, max_position_embeddings=2**31)
    with pytest.raises(ConfigError, match="sets max_position_embeddings to"):
        choose_spec(directory, config_of(directory))


@pytest.mark.parametrize(
    "head", ["", "{", "[]", '{"a": 5}', '{"a": {"shape": [8, "b", 4]}}', "[" * 10**5, None]
)
def test_what_is_no_safetensors_bounds_nothing(head: str | None, tmp_path: Path) -> None:
    """It is refused where tensors are read."""
    directory = write_checkpoint("llama", tmp_path)
    length = (2**63 if head is None else len(head)).to_bytes(8, "little")
    (directory / "model.safetensors").write_bytes(length + (head or "").encode())
    with pytest.raises(ConfigError, match="is damaged"):
        make(directory)
