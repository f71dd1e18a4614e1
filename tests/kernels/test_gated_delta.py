"""The gated delta rule, its convolution and its gates: compiled and by Triton, beside a float64
reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvserve.kernels.layer import gated_delta as reference
from kvserve.kernels.layer import gated_delta_cpu as compiled
from kvserve.kernels.layer import gated_delta_triton as on_gpu
from kvserve.kernels.layer.gated_delta import RowChunks

pytestmark = pytest.mark.usefixtures("device")
ROWS = 9
LENGTHS = [1, 5, 0, 37, 1]
SHAPES = [(2, 4, 16, 16, 4), (1, 3, 24, 40, 4), (3, 3, 10, 12, 3), (1, 1, 128, 128, 2)]
"""Heads of keys, heads, their dimensions, and taps."""
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
WITHIN = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# The interpreter rounds to bfloat16 in its own way: that is for a GPU.
KINDS = [
    *(pytest.param(compiled, x, marks=pytest.mark.compiler) for x in compiled.DTYPES),
    *((on_gpu, x) for x in list(WITHIN)[: 2 + torch.cuda.is_available()]),
]
kinds = pytest.mark.parametrize(("functions", "dtype"), KINDS)


class Case(NamedTuple):
    """What a layer projects of some tokens, as views of one matrix, and its weights and states."""

    qkv: Tensor
    gate: Tensor
    b: Tensor
    a: Tensor
    taps: Tensor
    decay: Tensor
    scale: Tensor
    tails: Tensor
    states: Tensor
    chunks: RowChunks


def chunks_of(lengths: list[int]) -> RowChunks:
    """Of rows in no order."""
    rows = torch.tensor([4, 7, 0, 8, 2, 1])[: len(lengths)]
    return RowChunks(rows, torch.tensor([0, *lengths]).cumsum(0), max(lengths))


def make(shape: tuple[int, ...], dtype: torch.dtype, lengths: list[int]) -> Case:
    key_heads, heads, key_dim, value_dim, taps = shape
    channels, values = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    projected = draw(sum(lengths), channels + values + 2 * heads).to(dtype)
    rates = torch.rand(heads, generator=generator) * 8 + 0.1
    qkv, gate, b, a = projected.split([channels, values, heads, heads], dim=1)
    return Case(
        qkv,
        gate,
        b,
        a,
        taps=draw(taps, channels).to(dtype),
        decay=torch.stack([rates.log(), draw(heads)]),
        scale=draw(value_dim).to(dtype),
        tails=draw(ROWS, channels, taps - 1).to(dtype),
        states=draw(ROWS, heads, key_dim, value_dim),
        chunks=chunks_of(lengths),
    )


def run(functions: Any, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer reads of its states, and these afterwards."""
    tails, states = case.tails.clone(), case.states.clone()
    mixed = functions.causal_convolution(case.qkv, case.taps, tails, case.chunks)
    read = functions.gated_delta_rule(mixed, case.b, case.a, case.decay, states, case.chunks)
    return read, tails, states


def doubled(case: Case) -> Case:
    numbers: dict[str, Any] = {
        name: x.double() if isinstance(x, Tensor) else x for name, x in case._asdict().items()
    }
    return Case(**numbers)


def agrees(functions: Any, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """What ``functions`` find, near the reference."""
    found, wanted = run(functions, case), run(reference, doubled(case))
    within = WITHIN[case.qkv.dtype]
    for own, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(own.double(), its, atol=within, rtol=within)
    return found


@kinds
@shapes
@pytest.mark.parametrize("lengths", [LENGTHS, [1, 4, 0, 3, 1], [1, 1, 0, 1, 1]])
def test_a_step_of_unequal_chunks(
    functions: Any, dtype: torch.dtype, shape: tuple[int, ...], lengths: list[int]
) -> None:
    """Rows that are not in it, and one without a token, keep their states bit for bit."""
    case = make(shape, dtype, lengths)
    _, tails, states = agrees(functions, case)
    still = [row for row in range(ROWS) if row not in case.chunks.rows[[0, 1, 3, 4]].tolist()]
    assert torch.equal(tails[still], case.tails[still])
    assert torch.equal(states[still], case.states[still])
    assert not torch.equal(states[case.chunks.rows[0]], case.states[case.chunks.rows[0]])


@kinds
@pytest.mark.parametrize("lengths", [[16], [17, 15, 1], [5, 48, 33]])
@pytest.mark.parametrize("kind", ["forgets", "forgets all", "repeats"])
def test_strong_gates_and_one_token_again_and_again(
    functions: Any, dtype: torch.dtype, lengths: list[int], kind: str
) -> None:
    """A gate that keeps e^-1e5, or nothing, costs no digit of what comes after it. Tokens of one
    key, each of which takes back what the last one wrote, are as far apart as others."""
    case = make((1, 2, 32, 32, 4), dtype, lengths)
    if kind == "repeats":
        case.qkv[:, :64] = case.qkv[0, :64]
        case.b[:], case.a[:] = 20.0, -12.0
    else:
        case.a[::7] = 6e4 if kind == "forgets" else torch.inf
    agrees(functions, case)


@kinds
def test_a_chunk_alone(functions: Any, dtype: torch.dtype) -> None:
    """A short one gives the same bits beside long ones."""
    case = make(SHAPES[0], dtype, [3, 37])
    alone = case._replace(
        **{name: getattr(case, name)[:3] for name in ("qkv", "gate", "b", "a")},
        chunks=chunks_of([3]),
    )
    (found, _, states), (wanted, _, expected) = run(functions, case), run(functions, alone)
    row = case.chunks.rows[0]
    assert torch.equal(found[:3], wanted)
    assert torch.equal(states[row], expected[row])


@pytest.mark.parametrize("longest", [1, 3, 20])
def test_rows_that_are_padding(longest: int) -> None:
    """On a GPU a captured step has some; what they give are numbers."""
    case = make(SHAPES[1], torch.float32, [1, longest, 2, longest])
    right = run(on_gpu, case)
    rows = case.chunks.rows.clone()
    rows[[0, 2]] = -1
    read, tails, states = run(on_gpu, case._replace(chunks=case.chunks._replace(rows=rows)))
    assert read.isfinite().all()
    assert torch.equal(read[1 : 1 + longest], right[0][1 : 1 + longest])
    for found, wanted, before in ((tails, right[1], case.tails), (states, right[2], case.states)):
        wanted[case.chunks.rows[[0, 2]]] = before[case.chunks.rows[[0, 2]]]
        assert torch.equal(found, wanted)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_cuts_nor_other_rows_nor_threads_change_a_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(SHAPES[1], dtype, [50])
    whole = run(compiled, case)
    tails, states, parts = case.tails.clone(), case.states.clone(), []
    for first, end in ((0, 1), (1, 18), (18, 50)):
        tokens = slice(first, end)
        cut = case.chunks._replace(starts=torch.tensor([0, end - first]))
        given = {name: getattr(case, name)[tokens] for name in Case._fields[:4]}
        part = case._replace(**given, tails=tails, states=states, chunks=cut)
        read, tails, states = run(compiled, part)
        parts.append(read)
    assert torch.equal(torch.cat(parts), whole[0])
    assert torch.equal(tails, whole[1]) and torch.equal(states, whole[2])
    both = make(SHAPES[1], dtype, [50, 3])
    mates = [torch.cat([own, other[-3:]]) for own, other in zip(case[:4], both[:4], strict=True)]
    beside = case._replace(**dict(zip(Case._fields, mates, strict=False)), chunks=both.chunks)
    monkeypatch.setattr(compiled, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    read, tails, states = run(compiled, beside)
    row = case.chunks.rows[0]
    assert torch.equal(read[:50], whole[0])
    assert torch.equal(tails[row], whole[1][row]) and torch.equal(states[row], whole[2][row])


@kinds
@shapes
def test_gates(functions: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    case, within = make(shape, dtype, LENGTHS), WITHIN[dtype]
    x = case.gate.flip(0).contiguous()
    heads = x.unflatten(1, (shape[1], -1))
    found = functions.gated_norm(heads, case.scale, case.gate, 1e-6)
    given = heads.double(), case.scale.double(), case.gate.double()
    wanted = reference.gated_norm(given[0], given[1], given[2], 1e-6)
    torch.testing.assert_close(found.double(), wanted, atol=within, rtol=within)
    opened = functions.sigmoid_gate(x, case.gate)
    wanted = reference.sigmoid_gate(x.double(), case.gate.double())
    torch.testing.assert_close(opened.double(), wanted, atol=within, rtol=within)


def test_the_reference_is_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of two dimensions, by hand: half of the state is kept, and a key of length one that
    is read at once gives its own value, a strength of one half of the way there."""
    monkeypatch.setattr(reference, "LEAST_LENGTH", 0.0)
    states = torch.tensor([[[[2.0], [4.0]]]], dtype=torch.float64)
    decay = torch.tensor([[0.0], [0.0]], dtype=torch.float64)  # the rate is 1
    kept = torch.tensor(0.5).double().log()  # exp(-softplus(a)) = 1/2 for a = 0
    assert float((-torch.nn.functional.softplus(torch.zeros(1).double()) - kept).abs()) < 1e-12
    qkv = torch.tensor([[3.0, 0.0, 3.0, 0.0, 9.0]], dtype=torch.float64)
    none = torch.zeros(1, 1, dtype=torch.float64)  # its sigmoid is 1/2
    read = reference.gated_delta_rule(
        qkv, none, none, decay, states, RowChunks(torch.tensor([0]), torch.tensor([0, 1]))
    )
    # Of 2 one is kept, and goes half of the way to 9; the other dimension of the state halves.
    torch.testing.assert_close(states.flatten(), torch.tensor([5.0, 2.0]).double())
    torch.testing.assert_close(read.flatten(), torch.tensor([5.0 * 2**-0.5]).double())


@pytest.mark.compiler
def test_what_does_not_fit_is_refused() -> None:
    case = make(SHAPES[0], torch.float32, [3])
    rule = case.qkv.contiguous(), case.b, case.a, case.decay, case.states
    with pytest.raises(IndexError, match="chunk 0 is of row 9, which has no states"):
        compiled.gated_delta_rule(*rule, case.chunks._replace(rows=torch.tensor([ROWS])))
    starts = torch.tensor([0, 4])
    with pytest.raises(IndexError, match="chunk 0 ends at token 4, which is not there"):
        compiled.gated_delta_rule(*rule, case.chunks._replace(starts=starts))
    with pytest.raises(IndexError, match="causal_convolution: chunk 0 ends at token 4"):
        odd = case.chunks._replace(starts=starts)
        compiled.causal_convolution(case.qkv, case.taps, case.tails, odd)
    with pytest.raises(ValueError, match="dense int64 rows"):
        compiled.gated_delta_rule(*rule, case.chunks._replace(rows=torch.tensor([0, 1])))
    with pytest.raises(ValueError, match=r"gated_delta_rule: .* do not fit"):
        compiled.gated_delta_rule(*rule[:3], case.decay.double(), case.states, case.chunks)
    for functions in (compiled, on_gpu):
        with pytest.raises(ValueError, match=r"causal_convolution: .* do not fit"):
            functions.causal_convolution(case.qkv.half(), case.taps, case.tails, case.chunks)
        with pytest.raises(ValueError, match=r"gate: .* does not fit"):
            functions.sigmoid_gate(case.qkv.contiguous(), case.gate)
