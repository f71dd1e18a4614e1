"""Which attention backends there are, what each can do, and which one an engine takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvserve.engine.attention.base import AttentionBackend, StoreKV
from kvserve.engine.attention.cpu import CpuAttention
from kvserve.engine.attention.torch_sdpa import TorchAttention
from kvserve.kernels import store_kv
from kvserve.kernels.cpu import paged_attention
from kvserve.kernels.cpu import store_kv as cpu_store_kv
from kvserve.kernels.cpu.build import BuildError, load_library
from kvserve.log import ConfigError, logger


@dataclass(frozen=True, slots=True)
class Needs:
    """What an engine asks of its attention."""

    device: str
    dtype: torch.dtype
    head_dim: int
    block_size: int
    scale: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend taken; ``reason`` says how it works and why those before it were refused."""

    name: str
    backend: AttentionBackend
    store_kv: StoreKV
    reason: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    """``None`` among devices or dtypes: all of them. ``head_dim`` says why one is refused."""

    name: str
    how: str
    make: Callable[[Needs], AttentionBackend]
    store_kv: StoreKV = store_kv.store_kv
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    head_dim: Callable[[int], str | None] = lambda dim: None

    def refusal(self, needs: Needs) -> str | None:
        if self.devices is not None and needs.device not in self.devices:
            return f"device {needs.device} is not {' or '.join(self.devices)}"
        if self.dtypes is not None and needs.dtype not in self.dtypes:
            return f"dtype {_name(needs.dtype)} is not {' or '.join(map(_name, self.dtypes))}"
        return self.head_dim(needs.head_dim)


def _make_cpu(needs: Needs) -> AttentionBackend:
    for name in ("paged_attention", "store_kv"):
        load_library(name)
    return CpuAttention(needs.scale)


def _make_torch(needs: Needs) -> AttentionBackend:
    return TorchAttention(needs.scale, needs.block_size, needs.dtype)


# In the order of preference.
_CANDIDATES = (
    _Candidate(
        name="cpu",
        how="compiled, reads blocks where they lie",
        make=_make_cpu,
        store_kv=cpu_store_kv.store_kv,
        devices=("cpu",),
        dtypes=paged_attention.DTYPES,
        head_dim=paged_attention.refusal,
    ),
    _Candidate(name="torch", how="gathered blocks and torch's SDPA", make=_make_torch),
)


def select_backend(wanted: str, needs: Needs) -> Choice:
    """The first that can (``auto``), or the one named. ``ConfigError`` if that one cannot."""
    refused: list[str] = []
    for candidate in _CANDIDATES:
        if wanted not in ("auto", candidate.name):
            continue
        refusal = candidate.refusal(needs)
        if refusal is None:
            try:
                backend = candidate.make(needs)
            except BuildError as error:
                refusal = str(error)
                logger.warning("attention backend %s is not there: %s", candidate.name, refusal)
            else:
                reason = "; ".join([candidate.how, *refused])
                return Choice(candidate.name, backend, candidate.store_kv, reason)
        refused.append(f"not {candidate.name}: {refusal}")
    raise ConfigError(f"--attention-backend {wanted}: {', '.join(refused)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
