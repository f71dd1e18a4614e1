"""Which attention backends there are, what each can do, and which ones an engine takes."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass, replace

import torch

from kvserve.engine.attention.base import AttentionBackend
from kvserve.engine.attention.paged import PagedAttention, triton_refusal
from kvserve.entry_format import FORMATS
from kvserve.kernels import storage
from kvserve.kernels.attend import paged_attention_cpu
from kvserve.kernels.build import USUAL_DIM, WIDE, BuildError, defines_of, load_library
from kvserve.kernels.storage import StorageKernels
from kvserve.late import Late
from kvserve.log import ConfigError, logger

_attention_triton = Late("kernels.attend.paged_attention_triton:paged_attention_triton")
_by_layer = Late("engine.attention.combined:ByLayer")
_by_phase = Late("engine.attention.combined:ByPhase")
_torch = Late("engine.attention.torch_sdpa:TorchAttention")


@dataclass(frozen=True, slots=True)
class Needs:
    """What an engine asks of its attention.

    ``form``: what entries are stored as, a value of ``--kv-cache-dtype``. ``codes``: entries are
    held as codes. ``rest``: what events do not keep stays in fewer bits. Layers ``windowed`` have
    sliding windows, and heads of ``window_dim`` if not of ``head_dim``; ``soft_cap`` is the
    model's, if any.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    block_size: int
    scale: float
    form: str = "auto"
    codes: bool = False
    rest: bool = False
    windowed: frozenset[int] = frozenset()
    soft_cap: float = 0.0
    window_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen backend; ``reason`` says how it works and why others were refused."""

    name: str
    backend: AttentionBackend
    storage: StorageKernels
    reason: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A backend and what it can do. ``refuse`` gives reasons that the other fields do not.

    ``storage`` are the kernels that go with it, if it has its own. ``dtypes`` is ``None`` if it
    takes all of them. ``codes``: it reads entries that are held as codes; ``rest``: and what events
    left in fewer bits. ``only_named``: devices where ``auto`` skips it.
    """

    name: str
    how: Callable[[Needs], str]
    devices: tuple[str, ...]
    make: Callable[[Needs], AttentionBackend]
    storage: StorageKernels | None = None
    codes: bool = False
    rest: bool = False
    dtypes: tuple[torch.dtype, ...] | None = None
    only_named: tuple[str, ...] = ()
    refuse: Callable[[Needs], str | None] = lambda needs: None

    def refusal(self, needs: Needs, named: bool) -> str | None:
        devices = self.devices + (self.only_named if named else ())
        if needs.device not in devices:
            return f"device {needs.device} is not {' or '.join(devices)}"
        if self.dtypes is not None and needs.dtype not in self.dtypes:
            return f"dtype {_name(needs.dtype)} is not {' or '.join(map(_name, self.dtypes))}"
        if needs.codes and not self.codes:
            return "it does not read entries that are held as codes (--policy.codebook false)"
        if needs.rest and not self.rest:
            return "it does not read what events left in fewer bits (--policy.rest_bits 0)"
        return self.refuse(needs) or (
            self.refuse(replace(needs, head_dim=needs.window_dim)) if needs.window_dim else None
        )


def _make_cpu(needs: Needs) -> AttentionBackend:
    load_library("storage")
    for dim in {needs.head_dim, needs.window_dim or needs.head_dim}:
        _cpu_library(replace(needs, head_dim=dim))
    how = needs.scale, needs.block_size, needs.soft_cap
    return PagedAttention(paged_attention_cpu.paged_attention_cpu, *how, all_starts=True)


def _cpu_library(needs: Needs) -> CDLL:
    if needs.form == "auto":
        return load_library("paged_attention", *WIDE[needs.head_dim > USUAL_DIM])
    form = FORMATS[needs.form]
    return load_library("paged_attention", *defines_of(form.key, form.value))


# In order of preference.
_CANDIDATES = (
    _Candidate(
        name="cpu",
        how=lambda needs: (
            f"compiled ({paged_attention_cpu.instructions(_cpu_library(needs))}), reads blocks "
            "where they lie"
        ),
        devices=("cpu",),
        make=_make_cpu,
        storage=storage.COMPILED,
        codes=True,
        rest=True,
        dtypes=paged_attention_cpu.DTYPES,
        refuse=lambda needs: paged_attention_cpu.refusal(needs.head_dim, needs.form != "auto"),
    ),
    _Candidate(
        name="triton",
        how=lambda needs: "Triton kernels, read blocks where they lie",
        devices=("cuda",),
        make=lambda needs: _by_phase(
            PagedAttention(_attention_triton, needs.scale, needs.block_size, needs.soft_cap)
        ),
        storage=storage.TRITON,
        codes=True,
        only_named=("cpu",),
        refuse=lambda needs: triton_refusal(needs.device, needs.head_dim),
    ),
    _Candidate(
        name="torch",
        how=lambda needs: "gathered blocks and torch's SDPA",
        devices=("cpu", "cuda"),
        make=lambda needs: _torch(needs.scale, needs.block_size, needs.dtype, needs.soft_cap),
    ),
)
NAMES = ("auto", *(candidate.name for candidate in _CANDIDATES))


def select_backend(wanted: str, needs: Needs) -> Choice:
    """``wanted``: a backend's name; ``auto``: the first that can.

    ``ConfigError`` if a backend is named that cannot serve ``needs``.
    """
    if wanted not in NAMES:
        raise ConfigError(f"--attention-backend {wanted}: one of {', '.join(NAMES)} expected")
    refused: dict[str, list[str]] = {}
    taken, named = None, wanted != "auto"
    for candidate in _CANDIDATES:
        if named and wanted != candidate.name:
            continue
        why = candidate.refusal(needs, named)
        if why is None and taken is None:
            try:
                taken = candidate, candidate.make(needs)
            except BuildError as error:
                why = str(error)
                logger.warning("attention backend %s is not there: %s", candidate.name, why)
        if why is not None and named:
            raise ConfigError(f"--attention-backend {wanted}: {why}")
        if why is not None:
            refused.setdefault(why, []).append(candidate.name)
    refusals = [f"not {', '.join(who)}: {why}" for why, who in refused.items()]
    if taken is None:
        raise ConfigError(f"--attention-backend {wanted}: {'; '.join(refusals)}")
    found, backend = taken
    kernels = found.storage or storage.by_device(needs.device, needs.head_dim)
    if needs.windowed:
        backend = _by_layer(backend, needs.windowed)
    return Choice(found.name, backend, kernels, "; ".join([found.how(needs), *refusals]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
