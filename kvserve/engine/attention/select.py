"""Which attention backends there are, what each can do, and which ones an engine takes."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch

from kvserve.engine.attention.base import AttentionBackend
from kvserve.engine.attention.paged import PagedAttention, triton_refusal
from kvserve.entry_format import FORMATS
from kvserve.folders import install
from kvserve.kernels import storage
from kvserve.kernels.attend import paged_attention_cpu
from kvserve.kernels.build import USUAL_DIM, WIDE, BuildError, defines_of, load_library
from kvserve.kernels.storage import StorageKernels
from kvserve.late import Late
from kvserve.log import ConfigError, logger

NO_CODES = "it does not read entries that are held as codes (--policy.codebook false)"
NO_REMAINDERS = "it does not read what stands for dropped entries (--policy.remainder off)"
_attention_triton = Late("kernels.attend.paged_attention_triton:paged_attention_triton")
_by_layer = Late("engine.attention.combined:ByLayer")
_by_phase = Late("engine.attention.combined:ByPhase")
_flash = Late("engine.attention.flash:FlashAttention")
_torch = Late("engine.attention.torch_sdpa:TorchAttention")
_xformers = Late("engine.attention.xformers:XformersAttention")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Needs:
    """What an engine asks of its attention; ``per_head``: every KV head has a table of its own.

    ``log_shares``: queries are logged with the share of their attention that newest entries got.
    ``form``: what entries are stored as, a value of ``--kv-cache-dtype``. ``remainders``: something
    stands for entries that were dropped. ``codes``: entries are held as codes. ``rest``: what
    events do not keep stays in fewer bits. Layers ``windowed`` have sliding windows, and heads of
    ``window_dim`` if not of ``head_dim``; ``sinks`` and ``soft_cap`` are the model's, if any.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    block_size: int
    scale: float
    per_head: bool = False
    log_shares: bool = False
    form: str = "auto"
    remainders: bool = False
    codes: bool = False
    rest: bool = False
    windowed: frozenset[int] = frozenset()
    sinks: bool = False
    soft_cap: float = 0.0
    window_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen backend: ``name`` is its name, or ``PREFILL,DECODE``; ``reason`` says how it works
    and why others were refused."""

    name: str
    backend: AttentionBackend
    storage: StorageKernels
    reason: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A backend and what it can do. ``refuse`` gives reasons that the other fields do not.

    ``storage`` are the kernels that go with it, if it has its own. ``dtypes`` is ``None`` if it
    takes all of them. ``levels``: it reads quantised entries. ``codes``: it reads entries that are
    held as codes; ``rest``: and what events left in fewer bits. ``only_named``: devices where
    ``auto`` skips it.
    """

    name: str
    how: Callable[[Needs], str]
    devices: tuple[str, ...]
    make: Callable[[Needs], AttentionBackend]
    storage: StorageKernels | None = None
    levels: bool = True
    codes: bool = False
    rest: bool = False
    dtypes: tuple[torch.dtype, ...] | None = None
    only_named: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("prefill", "decode")
    refuse: Callable[[Needs], str | None] = lambda needs: None

    def refusal(self, needs: Needs, phase: str, named: bool) -> str | None:
        devices = self.devices + (self.only_named if named else ())
        if needs.device not in devices:
            return f"device {needs.device} is not {' or '.join(devices)}"
        if phase not in self.phases:
            return f"no {phase}; name another for that, as in xformers,triton"
        if self.dtypes is not None and needs.dtype not in self.dtypes:
            return f"dtype {_name(needs.dtype)} is not {' or '.join(map(_name, self.dtypes))}"
        if needs.form != "auto" and not self.levels:
            return f"reads keys and values as they were computed, not --kv-cache-dtype {needs.form}"
        if needs.codes and not self.codes:
            return NO_CODES
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


def _refuse_package(package: str, extra: str, block_multiple: int, needs: Needs) -> str | None:
    """The limits of both packages that kvserve adapts."""
    if find_spec(package) is None:
        return f"not installed: {install(extra)}"
    if needs.log_shares:
        return "it does not tell apart what newest entries got, which query_dtype int4 logs"
    if needs.remainders:
        return NO_REMAINDERS
    if needs.windowed or needs.sinks or needs.soft_cap:
        return "sliding windows, sinks and capped logits are not handed to it"
    if needs.per_head:
        return "tables per KV head (--kv-layout head)"
    if needs.head_dim % 8 or needs.head_dim > 256:
        return f"head_dim {needs.head_dim} is not a multiple of 8 up to 256"
    if needs.block_size % block_multiple:
        return f"--block-size {needs.block_size} is not a multiple of {block_multiple}"
    return None


# In order of preference. Adapters that no GPU has run yet come behind our own kernels.
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
        name="flash-attn",
        how=lambda needs: "the flash-attn package, reads blocks where they lie",
        devices=("cuda",),
        make=lambda needs: _by_phase(_flash(needs.scale)),
        levels=False,
        dtypes=_HALF,
        refuse=partial(_refuse_package, "flash_attn", "flash-attn", 256),
    ),
    _Candidate(
        name="xformers",
        how=lambda needs: "gathered blocks and the xformers package",
        devices=("cuda",),
        make=lambda needs: _xformers(needs.scale, needs.block_size),
        levels=False,
        dtypes=_HALF,
        phases=("prefill",),
        refuse=partial(_refuse_package, "xformers", "xformers", 1),
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
    """``wanted``: ``NAME`` for both phases, or ``PREFILL,DECODE``; ``auto``: the first that can.

    ``ConfigError`` if a backend is named that cannot serve ``needs``.
    """
    names = wanted.split(",")
    if len(names) > 2 or not set(names) <= set(NAMES):
        raise ConfigError(
            f"--attention-backend {wanted}: NAME or PREFILL,DECODE expected, of {', '.join(NAMES)}"
        )
    refused: dict[str, list[str]] = {}
    prefill, chunks = _take(names[0], "prefill", needs, refused)
    decode, tokens = prefill, chunks
    if names[0] != names[-1] or "decode" not in prefill.phases:
        decode, tokens = _take(names[-1], "decode", needs, refused)
    refusals = [f"not {', '.join(who)}: {why}" for why, who in refused.items()]
    kernels = decode.storage or storage.by_device(needs.device, needs.head_dim)
    if prefill is decode:
        name, backend, hows = decode.name, tokens, [decode.how(needs)]
    else:
        name, backend = f"{prefill.name},{decode.name}", _by_phase(chunks, tokens)
        hows = [f"prefill: {prefill.how(needs)}", f"decode: {decode.how(needs)}"]
    if needs.windowed:
        backend = _by_layer(backend, needs.windowed)
    return Choice(name, backend, kernels, "; ".join([*hows, *refusals]))


def _take(
    name: str, phase: str, needs: Needs, refused: dict[str, list[str]]
) -> tuple[_Candidate, AttentionBackend]:
    """The candidate of this name or, for ``auto``, the first that does not refuse.

    Adds the reasons of those that refuse to ``refused``.
    """
    taken, named = None, name != "auto"
    for candidate in _CANDIDATES:
        if named and name != candidate.name:
            continue
        why = candidate.refusal(needs, phase, named)
        if why is None and taken is None:
            try:
                taken = candidate, candidate.make(needs)
            except (BuildError, ImportError) as error:
                why = str(error)
                logger.warning("attention backend %s is not there: %s", candidate.name, why)
        if why is not None and named:
            raise ConfigError(f"--attention-backend {name}: {why}")
        if why is not None and candidate.name not in refused.setdefault(why, []):
            refused[why].append(candidate.name)
    if taken is None:
        why = "; ".join(f"not {', '.join(who)}: {reason}" for reason, who in refused.items())
        raise ConfigError(f"--attention-backend {name}: {why}")
    return taken


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
