"""kvserve: an LLM serving engine that compresses the KV cache while it serves.

The names below load on first use, so that importing ``kvserve.scheduler`` never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvserve.config import EngineConfig
    from kvserve.engine.frontend.async_engine import AsyncEngine
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

__all__ = [
    "LLM",
    "AsyncEngine",
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
    raise AttributeError(f"module 'kvserve' has no attribute {name!r}")
