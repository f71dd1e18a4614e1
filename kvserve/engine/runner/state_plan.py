"""What an engine is told whose model keeps states: their memory, and what they rule out."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kvserve.config import EngineConfig
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.runner.memory import GIB, free_memory
from kvserve.log import ConfigError, logger
from kvserve.scheduler.blocks.state_group import BOUNDARY, StateSpec
from kvserve.scheduler.layout import KVLayout

_LEAST_KEPT = 16
_SHARE = 4
"""States that are kept take at most a quarter of ``--kv-cache-memory``, or of a CPU's free memory.
Those at multiples of so many tokens take, of one prompt, at most a quarter of what its entries do,
and of all places."""


def num_kept(max_num_seqs: int) -> int:
    """Places for states that later prompts may begin with: half as many as sequences have, and
    never fewer than a few conversations want."""
    return max(max_num_seqs // 2, _LEAST_KEPT)


def with_states(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: str,
    layout: KVLayout,
    block_bytes: int,
    max_len: int,
) -> tuple[EngineConfig, StateSpec]:
    """The settings of an engine that keeps states, and their group.

    ``--kv-cache-memory`` counts states. ``ConfigError`` names what needs an earlier state.
    """
    cache, what = config.cache, f"the layers with states of {spec.architecture}"
    if cache.continuations == "on":
        raise ConfigError(f"--continuations on: {what} keep none of an earlier turn; use off")
    if config.scheduler.speculative_config and spec.delta is None:
        raise ConfigError(
            f"--speculative-config: {what} cannot take back a guess that was wrong; leave it out"
        )
    rows, free, ranks = config.scheduler.max_num_seqs, None, config.parallel.tensor_parallel_size
    states = spec.part(ranks).states
    row_bytes = sum(each.row_bytes(dtype.itemsize) for each in states)
    if device == "cpu":
        free = free_memory(device, 1.0) // ranks
    memory = cache.kv_cache_memory or free
    kept = num_kept(rows) if cache.enable_prefix_caching else 0
    if memory is not None:
        kept = min(kept, memory // _SHARE // row_bytes)
    token_bytes = block_bytes * layout.groups / layout.block_size
    least = _SHARE * max(row_bytes / token_bytes, max_len / max(kept, 1))
    every = max(least, config.scheduler.max_num_batched_tokens)
    unit = math.lcm(BOUNDARY, layout.block_size)
    group = StateSpec(
        *(1, states, row_bytes, rows, kept),
        every=math.ceil(every / unit) * unit,
        host_blocks=-(-row_bytes // block_bytes),
        ranks=ranks,
    )
    said = f"{rows} rows of states take {rows * row_bytes / 2**20:.0f} MiB"
    if kept:
        said += f", and {kept} that are kept {kept * row_bytes / 2**20:.0f}"
    said += "; lower --max-num-seqs"
    if free is not None and group.nbytes > free:
        raise ConfigError(f"--max-num-seqs: {free / GIB:.1f} GiB of memory are free, and {said}")
    if cache.kv_cache_memory is not None:
        left = cache.kv_cache_memory - group.nbytes
        if left <= 0:
            raise ConfigError(f"--kv-cache-memory: nothing is left for blocks: {said}")
        cache = replace(cache, kv_cache_memory=left)
    if cache.enable_prefix_caching and not kept:
        logger.info(
            "prefix caching is off: a quarter of the cache's memory does not hold one state of %s; "
            "raise --kv-cache-memory",
            what,
        )
        cache = replace(cache, enable_prefix_caching=False)
    return replace(config, cache=cache), group
