"""Measures a model's ``EntryTable``: one forward over a text that ships, once for each model.

It is kept in the user's cache by the name of the weights and the text, so that ranks, restarts and
other engines of the model write the same entries.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.cache.entry_table import EntryTable
from kvserve.engine.models.hub import SOURCES
from kvserve.engine.models.linear import linear
from kvserve.engine.models.rotary import Rotary
from kvserve.engine.models.transformer import Layer, Transformer
from kvserve.entry_format import BITS, NEWEST
from kvserve.folders import cache_folder
from kvserve.kernels.store.entries import Shaping
from kvserve.kernels.store.few_levels import SHAPED, VALUES, numbers_of, quantize
from kvserve.kernels.store.remainder import capped
from kvserve.kernels.store.turning import turn_torch
from kvserve.log import ConfigError, logger

FILE = "entries.table"
"""A table of this name beside the model is taken before any. It does not end in .safetensors:
engines read every such file of a folder as weights."""
TOKENS, OF_HEADS = 1024, 2560
"""Of the text; more are needed to tell which KV head loses how much."""
_FIRST = 4  # tokens that no mean counts: theirs are unlike all others
_POSITIONS, _FURTHEST = 256, 4096  # over which rotations are averaged
_DAMPING = 0.1
_VERSION = 3
_PARTS, _PART_BYTES = 64, 4096  # of each file, that name it
_QUERIES = 256  # whose attention is compared


def refusal(model: Transformer) -> str | None:
    """Why nothing can be measured of a model, if so."""
    if model.spec.borrowed:
        return "its modules are transformers' own"
    if model.spec.states:
        return "it has layers with states"
    if model.spec.rope.kind == "dynamic":
        return "dynamic RoPE rotates by other frequencies as a sequence grows"
    return None


def entry_table(
    model: Transformer, directory: Path, weights_are_there: bool, by_head: bool = False
) -> EntryTable:
    """The model's table, for the heads of this rank: the one beside the model, else as it was kept,
    else measured now; ``by_head``: with what each KV head loses. ``ConfigError``: the one beside it
    is another model's."""
    spec, group = model.spec, model.group
    sizes = spec.num_layers, model.part.num_kv_heads, spec.head_dim, model.embedding.device.type
    ids, why = None, refusal(model)
    if why is None:
        tokens = OF_HEADS if by_head else TOKENS
        ids, why = _text_ids(directory, spec.vocab_size, tokens)
    if ids is None:
        logger.info("entries in few bits are rounded plainly: %s", why)
        return EntryTable.plain(*sizes)
    name = _name_of(directory, ids) if weights_are_there else None
    folder, beside = cache_folder(), (directory if directory.is_dir() else directory.parent) / FILE
    path, found = None, None
    if folder is not None and name is not None:
        path = folder / f"entries-{name}{'-heads' * by_head}.safetensors"
    if beside.is_file():
        found = EntryTable.load(beside)
        if found is None or found.mean.shape != (spec.num_layers, spec.num_kv_heads, spec.head_dim):
            raise ConfigError(
                f"{beside} is not a table of this model's entries: remove it, or measure another "
                f"with kvserve calibrate --entries --model {directory}"
            )
    elif path is not None:
        kept = EntryTable.load(path)
        found = kept if kept is not None and kept.name == name else None
    # A rank alone may have found a file that another process wrote just now.
    if int(group.sum(torch.tensor(found is not None, device=sizes[-1]).int())) == group.size:
        assert found is not None
        return found.of_rank(group.rank, group.size).to(sizes[-1])
    logger.info("measuring keys and queries over %d tokens, once", len(ids))
    own = measure(model, torch.tensor(ids, device=model.embedding.device), by_head)
    whole = [x if group.size == 1 else group.gather(x, dim=1) for x in _tensors(own)]
    if path is not None and group.rank == 0:
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            parts = own.noise, name or "", own.by_head
            EntryTable(whole[0], whole[1], whole[2], *parts).save(path)
    return replace(own, name=name or "not kept")


def measured(model: Transformer, directory: Path, ids: list[int]) -> EntryTable:
    """A table of another text, by its name. ``ConfigError``: the model cannot have one."""
    why = refusal(model)
    if why is None and len(ids) <= 2 * NEWEST:
        why = f"{len(ids)} tokens are too few: at least {2 * NEWEST + 1}"
    if why is not None:
        raise ConfigError(f"entries in few bits are rounded plainly: {why}")
    own = measure(model, torch.tensor(ids, device=model.embedding.device), by_head=True)
    return replace(own, name=_name_of(directory, ids) or "not kept")


def measure(model: Transformer, ids: Tensor, by_head: bool = False) -> EntryTable:
    """Of one text, int64 [T]: this rank's heads, and the noise of all; or of each, too."""
    with torch.inference_mode():
        census = _Census(model, ids, by_head)
        census.run()
    return census.table()


class _Census:
    """Stands in for the cache of a forward over one text, and looks at each layer behind it."""

    logs_shares = False
    rotate_and_store = None

    def __init__(self, model: Transformer, ids: Tensor, by_head: bool) -> None:
        self._by_head: list[Tensor] | None = [] if by_head else None
        self._model, self._ids, self._spec = model, ids, model.part
        self._keys: Tensor
        self._values: Tensor
        self._queries: Tensor
        self._sinks: Tensor | None
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []
        self._noise: list[Tensor] = []

    def table(self) -> EntryTable:
        mean, feedback, order = (torch.stack(x) for x in zip(*self._found, strict=True))
        by_head = None if self._by_head is None else torch.stack(self._by_head)
        return EntryTable(mean, feedback, order, torch.stack(self._noise).cpu(), by_head=by_head)

    def run(self) -> None:
        model = self._model
        model.tabulate(len(self._ids))  # the text may be longer than what is served
        batch = _batch_of(self._ids)
        hidden, added = model.embed(self._ids), None
        lengths = batch.positions, batch.prompt_lens
        for index, layer in enumerate(model.decoder_layers):
            rotary = model.rotary
            if index in model.spec.windowed and model.rotary_of_windows is not None:
                rotary = model.rotary_of_windows
            before = hidden if added is None else hidden + added
            angles = rotary.at(*lengths)
            hidden, added = layer(hidden, added, angles, batch, self, self._attend, index)
            self._look_at(index, layer, rotary, angles, before.float())

    # ---- what a layer asks of a cache and an attention ----------------------------------------

    def store(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        self._keys, self._values = k.float(), v.float()

    def turn(self, x: Tensor) -> Tensor:
        return x

    def log(self, layer: int, batch: ForwardBatch, q: Tensor, shares: Tensor | None) -> None:
        self._queries = q.float()

    def _attend(
        self,
        layer: int,
        q: Tensor,
        cache: object,
        shares: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self._sinks = sinks
        at = torch.arange(len(q), device=q.device)
        window = self._spec.window if layer in self._model.spec.windowed else None
        keys, values = self._keys, self._values
        return self._attention(q.float(), at, keys, values, window).to(q.dtype)

    def _attention(
        self,
        q: Tensor,
        at: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        held: tuple[Tensor, Tensor] | None = None,
        first: int = 0,
    ) -> Tensor:
        """Of queries [n, Hq, D] of the tokens at ``at [n]``: [n, Hq, D], in float32. ``held``: keys
        and values of entries that are no longer as they were computed. ``first``: the number of the
        first query head."""
        group = q.shape[1] // keys.shape[1]
        place = torch.arange(len(keys), device=q.device)
        exact = (place >= at[:, None] // NEWEST * NEWEST) | (place == 0)
        hidden = place > at[:, None]
        if window is not None:
            hidden |= place <= at[:, None] - window
        out = torch.empty_like(q)
        for head in range(q.shape[1]):
            k, v = keys[:, head // group], values[:, head // group]
            logits = q[:, head] @ k.T
            if held is not None:
                logits = torch.where(exact, logits, q[:, head] @ held[0][:, head // group].T)
            logits = capped(logits * self._model.scale, self._spec.soft_cap)
            logits = logits.masked_fill(hidden, -torch.inf)
            if self._sinks is not None:
                sink = self._sinks[first + head].float().expand(len(q), 1)
                weights = torch.cat([logits, sink], dim=1).softmax(dim=-1)[:, :-1]
            else:
                weights = logits.softmax(dim=-1)
            out[:, head] = weights @ v
            if held is not None:
                out[:, head] += (weights * ~exact) @ (held[1][:, head // group] - v)
        return out

    # ---- what is found of a layer -------------------------------------------------------------

    def _look_at(
        self,
        index: int,
        layer: Layer,
        rotary: Rotary,
        angles: tuple[Tensor, Tensor],
        before: Tensor,
    ) -> None:
        rotates = layer.rotates
        cos, sin = (x[:, 0].double() / rotary.factor for x in angles)
        keys, queries = self._keys.double(), self._queries.double()
        if rotates:  # to position 0
            keys, queries = (_rotated(x, cos[:, None], -sin[:, None]) for x in (keys, queries))
        places = torch.linspace(0, _FURTHEST - 1, _POSITIONS, device=cos.device).long()
        cos, sin = (x[:, 0].double() / rotary.factor for x in _at(rotary, places))
        mean = keys[_FIRST:].mean(dim=0)
        group = self._queries.shape[1] // self._keys.shape[1]
        folded = queries.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)
        second = folded.transpose(1, 2) @ folded / folded.shape[1]  # [Hkv, D, D]
        if rotates:
            mean = _rotated(mean, cos.mean(dim=0), sin.mean(dim=0)) * rotary.factor
            second = _over_rotations(second, cos, sin)
        # A sink that is a parameter is no key's: what keys are less, its logit would lack.
        mean = mean.float() if self._sinks is None else torch.zeros_like(mean, dtype=torch.float32)
        feedback, order = shaping_of(second)
        self._found.append((mean, feedback, order))
        self._noise.append(self._noise_of(index, layer, Shaping(mean, feedback, order), before))

    def _noise_of(self, index: int, layer: Layer, shaping: Shaping, before: Tensor) -> Tensor:
        """float64 [2, 3]: of keys and of values in each of ``BITS``."""
        model, tokens = self._model, len(self._keys)
        at = torch.linspace(tokens // 4, tokens - 1, _QUERIES, device=before.device).long()
        window = self._spec.window if index in model.spec.windowed else None
        q, keys, values = self._queries[at], self._keys, self._values
        length = before[at].square().sum(dim=-1)

        def attended(held: tuple[Tensor, Tensor] | None = None) -> Tensor:
            return self._attention(q, at, keys, values, window, held)

        def added(x: Tensor) -> Tensor:
            return model.group.sum(linear(x.flatten(1).to(layer.out.dtype), layer.out))

        exact, found = attended(), torch.zeros(2, len(BITS), dtype=torch.float64)
        if layer.after_attention is not None:  # its size is what a norm makes of it
            out = added(exact)
            normed = layer.operators.norm(out, layer.after_attention, self._spec.rms_norm_eps)
            length = length * (out.float().norm(dim=-1) / normed.float().norm(dim=-1)).square()
        turned = turn_torch(keys, shaping.mean), turn_torch(values)

        def noise(difference: Tensor) -> float:
            # It goes through the matrix: that of two sums would be their rounding.
            return float((added(difference).float().square().sum(dim=-1) / length).mean())

        heads, group = keys.shape[1], q.shape[1] // keys.shape[1]
        by_head = torch.zeros(heads, 2, 4, dtype=torch.float64)
        for bits in range(1, 5):
            if bits not in BITS and self._by_head is None:
                continue
            k = turn_torch(_held(turned[0], bits, SHAPED[bits], shaping)) + shaping.mean
            v = turn_torch(_held(turned[1], bits, VALUES[bits]))
            for kind, held in enumerate(((k, values), (keys, v))):
                if bits in BITS:
                    found[kind, BITS.index(bits)] = noise(attended(held) - exact)
                for head in range(heads if self._by_head is not None else 0):
                    own, queries = slice(head, head + 1), slice(head * group, (head + 1) * group)
                    some = keys[:, own], values[:, own], window, (held[0][:, own], held[1][:, own])
                    lost = torch.zeros_like(exact)
                    lost[:, queries] = self._attention(q[:, queries], at, *some, queries.start)
                    lost[:, queries] -= exact[:, queries]
                    by_head[head, kind, bits - 1] = noise(lost)
        if self._by_head is not None:
            self._by_head.append(by_head)
        return found


def shaping_of(second: Tensor) -> tuple[Tensor, Tensor]:
    """Feedback float32 [H, D, D] and order int64 [H, D] of queries' second moments, float64 [H, D,
    D]: the Cholesky factor of the turned ones, damped, each column over its diagonal."""
    turned = turn_torch_both(second)
    middle = turned.diagonal(dim1=1, dim2=2)
    order = middle.argsort(dim=-1, stable=True)
    damped = turned + torch.diag_embed(_DAMPING * middle.mean(-1, keepdim=True).expand_as(middle))
    damped = damped + torch.diag_embed(torch.full_like(middle, 1e-12))
    sorted_ = damped.gather(1, order[:, :, None].expand_as(damped))
    sorted_ = sorted_.gather(2, order[:, None].expand_as(damped))
    factor = torch.linalg.cholesky(sorted_.cpu()).to(second.device)
    feedback = factor / factor.diagonal(dim1=1, dim2=2)[:, None]
    return feedback.float().contiguous(), order.contiguous()


def turn_torch_both(matrix: Tensor) -> Tensor:
    """H M H, float64 [H, D, D]."""
    eye = torch.eye(matrix.shape[-1], device=matrix.device)
    turning = turn_torch(eye).double()
    return turning @ matrix @ turning


def _held(x: Tensor, bits: int, factor: float, shaping: Shaping | None = None) -> Tensor:
    """What turned vectors [T, H, D] are held as."""
    return numbers_of(*quantize(x, bits, factor, shaping), bits, factor)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


def _over_rotations(matrix: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The mean of R M R' over rotations [N, D]: float64 [H, D, D]."""
    half, count = cos.shape[1] // 2, len(cos)
    c, s = cos[:, :half], sin[:, :half]
    cc, cs, sc, ss = (a.T @ b / count for a in (c, s) for b in (c, s))
    parts = matrix.unflatten(1, (2, half)).unflatten(3, (2, half))
    a, b, d, e = parts[:, 0, :, 0], parts[:, 0, :, 1], parts[:, 1, :, 0], parts[:, 1, :, 1]
    upper = cc * a - cs * b - sc * d + ss * e, cs * a + cc * b - ss * d - sc * e
    lower = sc * a - ss * b + cc * d - cs * e, ss * a + sc * b + cs * d + cc * e
    return torch.cat([torch.cat(upper, dim=2), torch.cat(lower, dim=2)], dim=1)


def _at(rotary: Rotary, places: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions, also of those behind the context."""
    angles = places[:, None].double() * rotary.inv_freq.double()  # type: ignore[union-attr]
    both = (
        torch.cat([x, x], dim=-1)[:, None] * rotary.factor for x in (angles.cos(), angles.sin())
    )
    return next(both), next(both)


def _batch_of(ids: Tensor) -> ForwardBatch:
    """One chunk of a row that holds nothing in any block."""
    tokens, device = len(ids), ids.device
    positions = torch.arange(tokens, device=device)
    return ForwardBatch(
        positions=positions,
        prompt_lens=torch.full_like(positions, tokens),
        slots=positions[:0],
        query_slots=None,
        last=positions[None, None],
        tables=positions[:0].int(),
        rows=np.zeros(1, np.int64),
        starts=np.array([0, tokens]),
        columns=np.ones(1, np.int64),
    )


def _tensors(table: EntryTable) -> tuple[Tensor, Tensor, Tensor]:
    assert table.feedback is not None and table.order is not None, "measured"
    return table.mean, table.feedback, table.order


def _text_ids(directory: Path, vocab_size: int, tokens: int) -> tuple[list[int] | None, str | None]:
    """The shipped text's tokens, or why there are none."""
    text = files("kvserve").joinpath("data", "calibration.txt").read_text(encoding="utf-8")
    try:
        if directory.suffix in SOURCES:
            ids = SOURCES[directory.suffix].tokenizer(str(directory)).encode(text)
        else:
            from tokenizers import Tokenizer

            ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    except (ConfigError, Exception) as error:
        return None, f"its tokenizer was not read ({str(error).splitlines()[0]})"
    ids = [token for token in ids if token < vocab_size][:tokens]
    return (ids, None) if len(ids) > 2 * NEWEST else (None, "its tokenizer makes too few tokens")


def _name_of(directory: Path, ids: list[int]) -> str | None:
    """A hash of the files of weights, as far as their headers and parts tell them apart, and of how
    they were measured; ``None`` if there are none."""
    folder = directory.is_dir()
    paths = sorted(directory.glob("*.safetensors")) if folder else [directory]
    how = _VERSION, ids, _FIRST, _POSITIONS, _FURTHEST, _DAMPING, _QUERIES, NEWEST
    found = hashlib.blake2b(repr(how).encode(), digest_size=12)
    for path in paths:
        with path.open("rb") as file:
            size = path.stat().st_size
            found.update(repr((path.name, size)).encode())
            for part in range(_PARTS):
                file.seek(part * size // _PARTS)
                found.update(file.read(_PART_BYTES))
    return found.hexdigest() if paths else None
