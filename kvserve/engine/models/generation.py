"""What a checkpoint's generation_config.json suggests: sampling settings and ending tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvserve.engine.messages import Row
from kvserve.engine.models.hub import SOURCES, read_json
from kvserve.engine.models.spec import ModelSpec
from kvserve.log import ConfigError, RequestError, logger
from kvserve.sampling_params import SamplingParams

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationDefaults:
    """``sampling`` are fields of ``SamplingParams``; ``left_out`` are those that it refuses."""

    sampling: dict[str, Any]
    left_out: dict[str, Any]
    eos_token_ids: list[int]

    def row(self, source: str) -> Row:
        """The start-up table's row; ``source`` is ``--generation-config``."""
        if source == "none":
            return "sampling defaults", "none", "--generation-config"
        reason = "generation_config.json; --generation-config"
        if self.left_out:
            reason = f"generation_config.json, but {_as_words(self.left_out)} is out of range"
        return "sampling defaults", _as_words(self.sampling) or "none", reason


def read_generation_config(
    directory: Path, spec: ModelSpec, *, use_sampling: bool = True
) -> GenerationDefaults:
    """The file's settings; those of a GGUF file go before those of the file beside it. Ending
    tokens come from config.json, or the GGUF file, if the file names none."""
    folder = directory.parent if directory.is_file() else directory
    path = folder / "generation_config.json"
    raw = read_json(path) if path.exists() else {}
    if directory.is_file():
        beside = {name: raw[name] for name in _SAMPLING if name in raw}
        raw = {**beside, **SOURCES[directory.suffix].sampling(directory)}
    eos = raw.get("eos_token_id")
    eos = list(spec.eos_token_ids) if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) for token in eos):
        raise ConfigError(f"--model: {path} sets eos_token_id to {eos!r}, which are no token ids")
    if outside := [token for token in eos if not 0 <= token < spec.vocab_size]:
        logger.warning(
            "%s names eos_token_id %s outside of the vocabulary of %d; no answer can end with that",
            *(path, ", ".join(map(str, outside)), spec.vocab_size),
        )
        eos = [token for token in eos if token not in outside]
    given = {name: raw[name] for name in _SAMPLING if use_sampling and raw.get(name) is not None}
    sampling = {name: value for name, value in given.items() if _is_taken(name, value)}
    left_out = {name: value for name, value in given.items() if name not in sampling}
    return GenerationDefaults(sampling, left_out, eos)


def _is_taken(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except (RequestError, TypeError):
        return False
    return True


def _as_words(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
