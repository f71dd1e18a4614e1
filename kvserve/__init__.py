"""kvserve: an LLM serving engine that compresses the KV cache while it serves.

The names below load on first use, so that importing ``kvserve.scheduler`` never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvserve.config import EngineConfig
    from kvserve.config import config_of as AsyncEngineArgs
    from kvserve.engine.frontend.async_engine import AsyncEngine
    from kvserve.engine.frontend.async_engine import AsyncEngine as AsyncLLM
    from kvserve.engine.frontend.async_engine import AsyncEngine as AsyncLLMEngine
    from kvserve.engine.frontend.llm import LLM
    from kvserve.log import ConfigError, EngineDeadError, RequestError
    from kvserve.outputs import CompletionOutput, RequestOutput
    from kvserve.sampling_params import SamplingParams

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "kvserve.engine.frontend.llm",
    "AsyncEngine": "kvserve.engine.frontend.async_engine",
    "EngineConfig": "kvserve.config",
    "SamplingParams": "kvserve.sampling_params",
    "RequestOutput": "kvserve.outputs",
    "CompletionOutput": "kvserve.outputs",
    "ConfigError": "kvserve.log",
    "EngineDeadError": "kvserve.log",
    "RequestError": "kvserve.log",
}
_VLLMS_NAMES = {
    "AsyncLLM": ("kvserve.engine.frontend.async_engine", "AsyncEngine"),
    "AsyncLLMEngine": ("kvserve.engine.frontend.async_engine", "AsyncEngine"),
    "AsyncEngineArgs": ("kvserve.config", "config_of"),
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name in _VLLMS_NAMES:
        module, own = _VLLMS_NAMES[name]
        return getattr(importlib.import_module(module), own)
    absent = importlib.import_module("kvserve.absent")
    if name in absent.EXPORTS:
        # Not an AttributeError: ``from kvserve import NAME`` would put a sentence of its own there.
        raise ImportError(absent.refusal(f"kvserve.{name}", absent.EXPORTS[name]))
    raise AttributeError(f"module 'kvserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
