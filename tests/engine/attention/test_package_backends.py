"""The adapters to flash-attn and xformers, on stand-ins with those packages' signatures."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve.engine.attention.base import AttentionBackend
from kvserve.engine.attention.combined import ByPhase
from kvserve.engine.attention.flash import FlashAttention
from kvserve.engine.attention.select import Needs, select_backend
from kvserve.engine.attention.torch_sdpa import TorchAttention
from kvserve.engine.attention.xformers import XformersAttention
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.compression.forwards import recompute
from kvserve.folders import install
from kvserve.log import ConfigError
from kvserve.scheduler.layout import KVLayout
from tests.engine.attention.test_backends import StoredCase, forward_batch
from tests.kernels.paged_case import SCALE, Shape, make

NEEDS = Needs("cuda", torch.bfloat16, head_dim=128, block_size=256, scale=0.25)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal, aligned at the ends. q: [Q, Hq, D]; k, v: [n, Hkv, D] -> [Q, Hq, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,nhd->hqn", q, k) * scale
    unseen = torch.ones_like(logits[0], dtype=torch.bool).triu(len(k) - len(q) + 1)
    probs = logits.masked_fill(unseen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqn,nhd->qhd", probs, v)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """flash-attn 2.8's signature, and what its C++ checks of paged keys."""
    assert block_table is not None and softmax_scale is not None and causal
    assert cu_seqlens_q.dtype is cu_seqlens_k.dtype is block_table.dtype is torch.int32
    assert cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous()
    assert block_table.stride(-1) == 1 and k.shape[1] % 256 == 0
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k <= block_table.shape[1] * k.shape[1]
    out = []
    for i, blocks in enumerate(block_table.long()):
        held = int(cu_seqlens_k[i + 1] - cu_seqlens_k[i])
        own = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
        keys, values = (x[blocks].flatten(0, 1)[:held] for x in (k, v))
        out.append(attend(own, keys, values, softmax_scale))
    return torch.cat(out)


@dataclass
class SeqLenInfo:
    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]


@dataclass
class PaddedSeqLenInfo(SeqLenInfo):
    seqlen: Tensor
    seqlen_py: list[int]
    padding: int


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask:
    """xformers 0.0.35's, as far as its operators read it."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: PaddedSeqLenInfo
    causal_diagonal: Any = None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: torch.device | None = None,
    ) -> BlockDiagonalCausalWithOffsetPaddedKeysMask:
        def tensor(numbers: Iterable[int]) -> Tensor:
            return torch.tensor(list(numbers), dtype=torch.int32, device=device)

        starts = torch.tensor([0, *q_seqlen]).cumsum(0).tolist()
        q_info = SeqLenInfo(tensor(starts), max(q_seqlen), min(q_seqlen), starts)
        lengths, starts = list(kv_seqlen), [i * kv_padding for i in range(len(kv_seqlen) + 1)]
        extremes = max(lengths), min(lengths)
        padded = tensor(starts), *extremes, starts, tensor(lengths), lengths, kv_padding
        return cls(q_info, PaddedSeqLenInfo(*padded))


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """query: [1, T, G, Hq / G, D]; key and value likewise, a group's heads being one in memory."""
    assert scale is not None and key.stride(3) == value.stride(3) == 0
    q_info, k_info = attn_bias.q_seqinfo, attn_bias.k_seqinfo
    assert query.shape[1] == q_info.seqstart_py[-1] and key.shape[1] == k_info.seqstart_py[-1]
    assert k_info.seqlen.dtype is torch.int32
    out = []
    for i, held in enumerate(k_info.seqlen.tolist()):
        assert held <= k_info.max_seqlen
        own = query[0, q_info.seqstart[i] : q_info.seqstart[i + 1]].flatten(1, 2)
        first = int(k_info.seqstart[i])
        keys, values = (x[0, first : first + held, :, 0] for x in (key, value))
        out.append(attend(own, keys, values, scale))
    return torch.cat(out).view(query.shape)


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(contents)
    return made


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BlockDiagonalCausalWithOffsetPaddedKeysMask
    bias = module("attn_bias", BlockDiagonalCausalWithOffsetPaddedKeysMask=mask)
    forward = memory_efficient_attention_forward
    fmha = module("fmha", attn_bias=bias, memory_efficient_attention_forward=forward)
    flash = module("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    monkeypatch.setitem(sys.modules, "xformers", module("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", module("xformers.ops", fmha=fmha))


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [1, 1, 40, 3], [1, 17, 16, 1], [7, 7, 7, 7]])
@pytest.mark.parametrize("backend", ["flash", "xformers", "xformers,flash"])
def test_adapters_agree_with_torch(backend: str, lengths: list[int], groups: int) -> None:
    shape = Shape(heads=8, groups=groups, block=256, columns=3)
    case = make(shape, [10, 300, 700, 60], lengths)
    batch = forward_batch(case, shape.block)
    flash, xformers = FlashAttention(SCALE), XformersAttention(SCALE, shape.block)
    adapters: dict[str, AttentionBackend] = {"flash": flash, "xformers": xformers}
    adapter = adapters.get(backend, ByPhase(xformers, flash))
    # An observation pass: every token has a limit of its own.
    limits = batch.last - torch.arange(batch.last.shape[-1]) % 3
    strided = replace(batch, last=limits.clamp(min=0), causal=False)
    for one in (batch, strided):
        reference, found = TorchAttention(SCALE, 256, torch.float32).plan(one), adapter.plan(one)
        for cache in (StoredCase(case, group) for group in range(groups)):
            expected = reference(0, case.query, cache)
            attended = found(0, case.query, cache)
            torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)


# ---- which are taken ----------------------------------------------------------------------------


def test_what_is_not_installed_is_refused() -> None:
    choice = select_backend("auto", NEEDS)
    assert choice.name == "triton"
    assert f"not flash-attn: not installed: {install('flash-attn')}" in choice.reason
    assert "not cpu: device cuda is not cpu" in choice.reason
    with pytest.raises(ConfigError, match=r"xformers: not installed: .*\[xformers\]'"):
        select_backend("xformers,triton", NEEDS)


@pytest.mark.usefixtures("packages")
def test_prefill_and_decode_apart() -> None:
    choice = select_backend("xformers,triton", NEEDS)
    assert choice.name == "xformers,triton"
    assert choice.reason.startswith("prefill: gathered blocks and the xformers package; decode: ")
    assert select_backend("flash-attn,auto", NEEDS).name == "flash-attn,triton"
    assert select_backend("flash-attn", NEEDS).name == "flash-attn"
    assert "not xformers: no decode" not in select_backend("auto", NEEDS).reason


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("wanted", "changes", "why"),
    [
        ("xformers", {}, "xformers: no decode; name another for that, as in xformers,triton"),
        ("flash-attn", {"block_size": 64}, "--block-size 64 is not a multiple of 256"),
        ("flash-attn", {"per_head": True}, r"tables per KV head \(--kv-layout head\)"),
        ("xformers,triton", {"head_dim": 320}, "head_dim 320 is not a multiple of 8 up to 256"),
        ("flash-attn", {"dtype": torch.float32}, "dtype float32 is not float16 or bfloat16"),
        ("flash-attn", {"device": "cpu"}, "device cpu is not cuda"),
        ("triton", {"head_dim": 96}, "head_dim 96 is not one of 16, 32, 64, 128, 256"),
        ("cpu", {}, "device cuda is not cpu"),
        ("triton,torch,torch", {}, "NAME or PREFILL,DECODE expected, of auto, cpu, triton, "),
        ("flashinfer", {}, "NAME or PREFILL,DECODE expected"),
    ],
)
def test_refusals_name_the_reason(wanted: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        select_backend(wanted, replace(NEEDS, **changes))


def test_a_package_that_does_not_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", module("flash_attn"))
    with pytest.raises(ConfigError, match=r"--attention-backend flash-attn: cannot import name"):
        select_backend("flash-attn", NEEDS)


def test_triton_on_a_cpu_is_taken_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = replace(NEEDS, device="cpu", dtype=torch.float16)
    choice = select_backend("auto", needs)
    assert choice.name == "torch"
    assert "not triton, flash-attn, xformers: device cpu is not cuda" in choice.reason
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_backend("triton", needs).name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="it needs Triton's interpreter: TRITON_INTERPRET=1"):
        select_backend("triton", needs)


def test_an_observation_pass_says_whether_its_chunks_are_causal() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4)
    batch = InputBatch(layout, 2, (1, 2, 1, 8), (1, 2, 1, 8), 4, 10, "cpu")
    rows, entries = np.array([0, 1]), np.array([[3, 4, 5, 6], [0, 1, 2, 3]])
    assert recompute(batch, rows, entries, entries).causal
    assert not recompute(batch, rows, entries[:, ::2], entries[:, ::2]).causal
