"""All settings of the engine, each defined once. The command line's flags are made from them."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from itertools import chain
from typing import Any, get_type_hints

from kvserve import absent
from kvserve.config_sections import (
    KV_CACHE_DTYPES,
    CacheConfig,
    Checks,
    CompressionConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    setting,
)
from kvserve.log import ConfigError
from kvserve.setting_values import checked

__all__ = [
    "KV_CACHE_DTYPES",
    "SECTIONS",
    "CacheConfig",
    "CompressionConfig",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "setting",
]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of one engine. ``EngineConfig.from_flat(**settings)`` takes flat field names.

    Raises ``ConfigError``, which names the flag, if a value is out of range or if two settings
    contradict each other.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    device: str = setting(
        "auto", "auto is a GPU where torch sees one", choices=("auto", "cuda", "cpu")
    )
    attention_backend: str = setting(
        "auto",
        "attention implementation: auto, cpu (compiled by g++ at first use), triton, flash-attn, "
        "xformers (prefill alone) or torch; two as in xformers,triton are for prefill and decode",
    )
    grammar_backend: str = setting(
        "auto",
        "library that compiles JSON schemas and grammars for structured output: llguidance, the "
        "only one",
    )
    enforce_eager: bool = setting(False, "never capture CUDA graphs (a CPU has none)")
    cudagraph_capture_sizes: tuple[int, ...] = setting(
        (),
        "batch sizes to capture a CUDA graph of decoding for; a batch is padded to the next size "
        "(accepts 1k; default on a GPU: 1, 2, 4, 8, multiples of 16 up to 512; a CPU has no "
        "graphs, and runs the same padded steps for sizes given here)",
        aliases=("--cuda-graph-sizes",),
    )

    def __post_init__(self) -> None:
        sections = (getattr(self, name) for name in SECTIONS)
        for ok, message in chain(*(section.checks() for section in sections), self._checks()):
            if not ok:
                raise ConfigError(message)

    def _checks(self) -> Checks:
        sizes = self.cudagraph_capture_sizes
        return (
            (all(size >= 1 for size in sizes), "--cudagraph-capture-sizes must be >= 1"),
            (
                not (self.enforce_eager and sizes),
                "--enforce-eager captures no graphs; drop --cudagraph-capture-sizes",
            ),
        )

    @classmethod
    def from_flat(cls, **settings: Any) -> EngineConfig:
        """Build from flat names (``max_num_seqs=8``), or from those of a flag's other names.

        Sizes may be text, as on the command line (``max_model_len="32k"``). ``ConfigError`` names
        what is unknown or has the wrong type.
        """
        sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        own: dict[str, Any] = {}
        known = {*_SETTINGS, *_ALIASES}
        settings = absent.take_known(
            settings, known, absent.SETTINGS, lambda text, _: ConfigError(text)
        )
        for given, value in settings.items():
            name = _ALIASES.get(given, given)
            if name != given and name in settings:
                raise ConfigError(f"{name} is given twice, once as {given}")
            section, item, hint = _SETTINGS[name]
            target = own if section is None else sections[section]
            target[name] = checked(item, hint, value)
        built = {name: SECTIONS[name](**values) for name, values in sections.items()}
        return cls(**built, **own)


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "compression": CompressionConfig,
}


def _settings() -> dict[str, tuple[str | None, Field[Any], Any]]:
    """By name: the section (``None``: the engine's own), the field and its type."""
    return {
        item.name: (section, item, hints[item.name])
        for section, kind in [*SECTIONS.items(), (None, EngineConfig)]
        for hints in [get_type_hints(kind)]
        for item in fields(kind)
        if "help" in item.metadata
    }


_SETTINGS = _settings()
_ALIASES = {
    alias.lstrip("-").replace("-", "_"): name
    for name, (_, item, _) in _SETTINGS.items()
    for alias in item.metadata.get("aliases", ())
}
