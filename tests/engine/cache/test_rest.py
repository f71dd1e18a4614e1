"""What events do not keep, in fewer bits: nothing is lost, whoever is beside, and tokens see all of
it as the reference does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.measuring.measure import held_bytes
from kvserve import LLM, SamplingParams
from kvserve.engine.attention import paged
from kvserve.engine.cache.entry_store import block_bytes
from kvserve.engine.cache.entry_table import EntryTable
from kvserve.engine.cache.rest_rows import RestRows, rest_spec
from kvserve.engine.compression.rest_events import RestEvents
from kvserve.entry_format import FORMATS, EntryFormat, bits_of_layers, few
from kvserve.kernels.attend.paged_attention import paged_attention_torch
from kvserve.kernels.store.few_levels import packed, quantize
from kvserve.kernels.store.turning import turn_torch
from kvserve.log import ConfigError, RequestError
from kvserve.scheduler.compression.rest_events import HostRestEvents
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.event import Events
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.models.decoding import make
from tests.engine.models.decoding import tokens as tokens_of

pytestmark = pytest.mark.usefixtures("few_newest", "some_text")
KARA = {"name": "kara", "window": 48, "buffer": 16, "ratio": 0.25, "period": 8, "rest_bits": 1.25}
KEYS = {"name": "keydiff", "budget": 40, "threshold": 64, "trigger": "threshold", "recent": 16}
SETTINGS: dict[str, Any] = {"kv_cache_dtype": "3bit"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("model"), head_dim=64)


def engine(directory: Path, policy: Any, **settings: Any) -> LLM:
    return make(directory, policy=policy, **{**SETTINGS, **settings})


def test_all_tokens_are_seen_as_the_reference_sees_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, calls = engine(directory, KARA, enforce_eager=True), list[float]()
    backend = llm.engine.core.runner.attention
    assert isinstance(backend, paged.PagedAttention)
    attend = backend._kernel

    def both(*args: Any, **more: Any) -> torch.Tensor:
        found = attend(*args, **more)
        more["shares"] = None
        torch.testing.assert_close(
            found, paged_attention_torch(*args, **more), rtol=1e-4, atol=1e-4
        )
        without = paged_attention_torch(*args, **more | {"rest": None})
        calls.append(float((found - without).abs().max()))
        return found

    monkeypatch.setattr(backend, "_kernel", both)
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
    outputs = llm.generate(random_prompts([30, 9], seed=2), params, use_tqdm=False)
    assert max(calls) > 0.01  # tokens do look there
    for output in outputs:
        details = output.kv_cache_details
        assert details.held_tokens == details.logical_tokens
        assert details.evicted_tokens == 0 < details.rest_entries


def test_the_rest_is_what_was_dropped(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event appends what it does not keep, written anew from what was held, by the rule of
    ``few_levels.py`` in each lane's bits."""
    llm = engine(directory, KARA, enforce_eager=True, kv_cache_dtype="2bit", block_size=32)
    runner = llm.engine.core.runner
    (rest,) = (group for group in runner.batch.groups if isinstance(group, RestRows))
    wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
    copied: list[list[torch.Tensor]] = []
    read = RestEvents._read

    def on_read(self: RestEvents, events: Any, windows: Any, places: torch.Tensor) -> Any:
        slots, keys, values, copies = read(self, events, windows, places)
        dropped = windows.length - places.shape[-1]
        assert len(slots) == len(windows.rows) * dropped
        kept = {(h, int(p)) for h in range(places.shape[2]) for p in places[0, 0, h]}
        assert len(kept) == places.shape[2] * places.shape[3]
        wanted.append((keys[:, :, -dropped:], values[:, :, -dropped:]))
        copied.append(copies)
        return slots, keys, values, copies

    monkeypatch.setattr(RestEvents, "_read", on_read)
    llm.generate(
        random_prompts([30], seed=2), SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False
    )
    keys, values = (torch.cat(parts, dim=2) for parts in zip(*wanted, strict=True))
    count = keys.shape[2]
    assert count == 24 * len(wanted) > 0  # 32 of a window's 48, of which 8 stay
    assert rest.spec.block_tokens > runner.cache.layout.block_size
    used = [bits for layer in rest.blocks.layers for bits in (layer.key.bits, layer.value.bits)]
    assert min(used) == 1 < max(used)
    table = rest.tables[0][0, 0, 0].long()
    blocks = table[: -(-count // rest.spec.block_tokens)]
    as_they_were = {(lane, own.of_keys): i for i, (lane, _, own) in enumerate(rest._equal)}
    assert 0 < len(as_they_were) < 2 * len(rest.blocks.layers)
    for lane, (layer, k, v) in enumerate(
        zip(rest.blocks.layers, keys.flatten(0, 1), values.flatten(0, 1), strict=True)
    ):
        for held, x in zip(rest.blocks.layer(lane), (k, v), strict=True):
            there = held.tiles[blocks][..., held.places].flatten(0, 3)[:count]
            place = as_they_were.get((lane, held.of_keys))
            if place is not None:  # in as many bits as before: the same bytes
                assert torch.equal(there, torch.cat([each[place][0] for each in copied]))
                continue
            shaping = layer.shaping if held.of_keys else None
            mean = layer.shaping.mean if held.of_keys else None
            turned = turn_torch(x[:, None], mean, torch.float32)
            levels, codes = quantize(turned, held.form.bits, held.factor, shaping)
            new = torch.cat([packed(levels, held.form.bits), codes[..., None]], dim=-1)[:, 0]
            assert torch.equal(there, new)


def test_a_budget_never_reached_is_none(directory: Path) -> None:
    prompts = random_prompts([20, 9], seed=3)
    policy = KARA | {"window": 512, "buffer": 128}
    with_rest = engine(directory, policy)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0, logprobs=3)
    # The newest entries are half as many beside a rest, so both engines have one.
    answers = [
        [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]
        for outputs in (
            with_rest.generate(prompts, params, use_tqdm=False),
            with_rest.generate(
                prompts,
                SamplingParams(
                    max_tokens=60, ignore_eos=True, temperature=0.0, logprobs=3, kv_policy="none"
                ),
                use_tqdm=False,
            ),
        )
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("caching", [False, True], ids=["alone", "cached"])
def test_an_event_takes_its_blocks_from_those_that_it_gives(
    directory: Path, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool that has no others; also where a cache names them, too."""
    policy = KEYS | {"rest_bits": 1.25, "threshold": 112}
    llm = engine(directory, policy, max_num_seqs=1, enable_prefix_caching=caching)
    prompts, scheduler = random_prompts([112], seed=2), llm.engine.core.scheduler
    expected, take, events = tokens_of(llm, prompts, 150), HostRestEvents.take_blocks, list[Any]()

    def take_few(self: HostRestEvents, due: Events) -> Events | None:
        others = scheduler.pool.allocate(scheduler.pool.num_free)
        events.append(take(self, due))
        scheduler.pool.release(others)
        return events[-1]

    monkeypatch.setattr(HostRestEvents, "take_blocks", take_few)
    assert tokens_of(llm, prompts, 150) == expected
    assert len(events) > 1 and None not in events
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("policy", "settings", "word"),
    [
        (KARA, {"kv_cache_dtype": "k8v4"}, "rest_bits: a rest is read by"),
        (KARA, {"kv_layout": "head"}, "use --kv-layout model"),
        (KARA | {"remainder": "mean"}, {}, "off with rest_bits"),
        (KARA | {"rest_bits": 0.5}, {}, "at least 1"),
        (KARA | {"rest_bits": 4}, {}, "save no block"),
        ({"name": "adakv", "budget": 64, "rest_bits": 2}, {}, "rest_bits must be 0 where"),
        (KARA, {"attention_backend": "torch"}, "left in fewer bits"),
    ],
    ids=["form", "layout", "remainder", "below one", "four", "uneven", "backend"],
)
def test_what_cannot_be_is_refused(
    directory: Path, policy: dict[str, Any], settings: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        engine(directory, policy, **settings)


def test_a_request_may_not_bring_another(directory: Path) -> None:
    llm = engine(directory, KARA)
    params = SamplingParams(max_tokens=2, kv_policy=KARA | {"rest_bits": 2.5})
    with pytest.raises(RequestError, match=r"rest_bits are 1\.25 on this server"):
        llm.generate([[5, 6]], params, use_tqdm=False)


def test_the_start_up_table_counts_it(directory: Path) -> None:
    """In the pool's row, too: as many sequences as the entries and the rest of each leave room."""

    def rows(policy: dict[str, Any]) -> dict[str, tuple[str, str]]:
        summary = engine(directory, policy).engine.core.described().summary
        return {name: (state, why) for name, state, why in summary}

    rest, plain = rows(KEYS | {"rest_bits": 1.25}), rows(KEYS)
    assert "bytes a token" in rest["rest"][0] and "rest" not in plain
    assert "newest 16 at most" in rest["kv cache dtype"][1]
    held, without = (float(each["kv pool"][1].split(", ")[1].split()[0]) for each in (rest, plain))
    assert held < without


@pytest.mark.parametrize("dim", [16, 24, 48, 80, 128])
def test_heads_of_any_size(dim: int) -> None:
    """Where 1 and 2 bits take as many bytes, 1 is not there; a block is never too full."""
    table = EntryTable.plain(2, 3, dim, "cpu")
    form, layout = FORMATS["3bit"], KVLayout(2, 3, dim, 64)
    size = block_bytes(layout, form)
    tokens = rest_spec(layout, size, 1.25, form).block_tokens
    lanes = [(layer, head) for layer in range(2) for head in range(3)]
    bits = table.bits_of_heads(lanes, dim, size // tokens - 2 * len(lanes), [3] * 12)
    held = (EntryFormat("", few(key), few(value)) for key, value in bits)
    assert sum(each.block_bytes(tokens, dim, 1, 1) for each in held) <= size
    assert all(bits_of_layers(dim, least=1)[0] <= each <= 3 for both in bits for each in both)


def test_benchmarks_count_its_bytes(directory: Path) -> None:
    llm = engine(directory, KEYS | {"rest_bits": 1.25})
    cache = llm.engine.core.runner.cache
    lanes, block = cache.layout.num_layers * cache.layout.num_kv_heads, cache.kv[0].nbytes
    figures = {"held_entries_at_end": 96.0 * lanes, "rest_entries_at_end": 64.0 * lanes}
    more = {"remainder_entries_at_end": 0.0, "mean_pool_usage": 0.5, "mean_running": 1.0}
    found = held_bytes(llm.engine, figures | more)
    assert found["held_bytes_at_end"] == pytest.approx(4 * block, rel=1e-3)  # two of each
