"""What an engine is told whose model keeps states: their memory, and what they rule out."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvserve.config import EngineConfig
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.runner.memory import GIB, free_memory
from kvserve.log import ConfigError, logger
from kvserve.scheduler.blocks.state_group import StateSpec


def with_states(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: str
) -> tuple[EngineConfig, StateSpec]:
    """The settings of an engine that keeps states, and their group.

    Prefix caching is off: a state is of all that its row has read, and blocks hold none of it.
    ``--kv-cache-memory`` counts states. ``ConfigError`` names what needs an earlier state.
    """
    cache, what = config.cache, f"the layers with states of {spec.architecture}"
    if cache.continuations == "on":
        raise ConfigError(f"--continuations on: {what} keep none of an earlier turn; use off")
    if config.scheduler.speculative_config:
        raise ConfigError(
            f"--speculative-config: {what} cannot take back a guess that was wrong; leave it out"
        )
    rows = config.scheduler.max_num_seqs
    row_bytes = sum(each.row_bytes(dtype.itemsize) for each in spec.states)
    group = StateSpec(1, spec.states, row_bytes, rows)
    said = f"{rows} rows of states take {group.nbytes / 2**20:.0f} MiB; lower --max-num-seqs"
    if device == "cpu" and group.nbytes > (free := free_memory(device, 1.0)):
        raise ConfigError(f"--max-num-seqs: {free / GIB:.1f} GiB of memory are free, and {said}")
    if cache.kv_cache_memory is not None:
        left = cache.kv_cache_memory - group.nbytes
        if left <= 0:
            raise ConfigError(f"--kv-cache-memory: nothing is left for blocks: {said}")
        cache = replace(cache, kv_cache_memory=left)
    if cache.enable_prefix_caching:
        logger.info("prefix caching is off: %s hold what blocks do not", what)
        cache = replace(cache, enable_prefix_caching=False)
    return replace(config, cache=cache), group
