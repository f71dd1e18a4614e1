"""Find a checkpoint, check it, and read its weights into the decoder's fused matrices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from kvserve.config import ModelConfig
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer
from kvserve.log import ConfigError

SHIPPED_MODEL = "kvserve/tiny"
_SHIPPED_DIRECTORY = Path(__file__).parents[2] / "data" / "tiny"
_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def find_model(name: str, revision: str | None = None, files: list[str] = _FILES) -> Path:
    """Directory of a checkpoint: the shipped one, a local path, or a hub id (its ``files``
    downloaded)."""
    if name == SHIPPED_MODEL:
        return _SHIPPED_DIRECTORY
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.count("/") != 1 or name.startswith("."):
        raise ConfigError(f"--model: {name} is neither a directory nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"--model: cannot get {name} from the hub ({reason}); give a directory, or "
            "huggingface-cli login for a gated model"
        ) from error


def load_model(
    directory: Path,
    config: ModelConfig,
    spec: ModelSpec,
    max_len: int,
    dtype: torch.dtype,
    device: str,
) -> Transformer:
    """The decoder with its weights (random ones for ``load_format="dummy"``)."""
    with _default_dtype(dtype), torch.device(device):
        model = Transformer(spec, max_len, dtype, device)
    if config.load_format == "dummy":
        _fill_randomly(model, config.seed)
    else:
        _read_weights(model, directory, config.model)
    return model.eval()


def _read_weights(model: Transformer, directory: Path, name: str) -> None:
    targets = _targets(model)
    missing = set(targets)
    shards = _shards(directory)
    for shard in tqdm(shards, desc=f"Loading {name}", unit="shard"):
        try:
            with safe_open(shard, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (not a dict)
                    if key in targets:
                        _copy(targets[key], tensors.get_tensor(key), key, shard)
                        missing.discard(key)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"--model: {shard} is damaged ({error}); fetch it again") from error
    if missing:
        raise ConfigError(
            f"--model: the checkpoint in {directory} has no tensor {min(missing)} "
            f"({len(missing)} missing)"
        )


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    shards = [directory / name for name in names]
    for shard in shards:
        if not shard.exists():
            raise ConfigError(
                f"--model: {shard} is missing; fetch it again, or use --load-format dummy for "
                "random weights"
            )
    return shards


def _copy(target: Tensor, source: Tensor, key: str, shard: Path) -> None:
    if target.shape != source.shape:
        raise ConfigError(
            f"--model: {key} in {shard} has shape {tuple(source.shape)}, config.json says "
            f"{tuple(target.shape)}"
        )
    target.copy_(source)


def _targets(model: Transformer) -> dict[str, Tensor]:
    """Checkpoint name -> where its tensor goes, a slice of a fused matrix where they are fused."""
    spec = model.spec
    targets: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.norm,
    }
    if not spec.tied_embeddings:
        targets["lm_head.weight"] = model.head
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for index, layer in enumerate(model.decoder_layers):
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        for part, rows in zip("qkv", layer.qkv.split([q_size, kv_size, kv_size]), strict=True):
            targets[f"{attention}{part}_proj.weight"] = rows
        if layer.qkv_bias is not None:
            biases = layer.qkv_bias.split([q_size, kv_size, kv_size])
            for part, rows in zip("qkv", biases, strict=True):
                targets[f"{attention}{part}_proj.bias"] = rows
        if layer.q_norm is not None and layer.k_norm is not None:
            targets[attention + "q_norm.weight"] = layer.q_norm
            targets[attention + "k_norm.weight"] = layer.k_norm
        gate, up = layer.gate_up.chunk(2)
        targets |= {
            attention + "o_proj.weight": layer.out,
            prefix + "input_layernorm.weight": layer.input_norm,
            prefix + "post_attention_layernorm.weight": layer.post_norm,
            mlp + "gate_proj.weight": gate,
            mlp + "up_proj.weight": up,
            mlp + "down_proj.weight": layer.down,
        }
    return targets


def _fill_randomly(model: nn.Module, seed: int) -> None:
    """Small normal weights; norms are ones, so that activations stay in range."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
