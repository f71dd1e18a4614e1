"""Which replica gets a request, and what travels back; without Ray."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvserve.outputs import Compaction, CompletionOutput, Logprob, RequestOutput
from kvserve.server.replicas.replica_stream import OutputReader, OutputWriter, held_tokens, total
from kvserve.server.replicas.routing import HeldTokenRouter
from kvserve.stats import CompactionCounts, EngineStats, RequestStats

REPLICAS = ["a", "b", "c"]


def send(router: HeldTokenRouter, request_id: str, prompt: list[int]) -> str:
    router.add(request_id, prompt)
    best = router.rank(request_id, REPLICAS)[0]
    router.send(request_id, best)
    router.holds(request_id, len(prompt))  # it has its first token
    return best


def prompt(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def test_equal_replicas_take_turns() -> None:
    router = HeldTokenRouter()
    taken = []
    for i in range(6):
        taken.append(send(router, str(i), prompt(1000 * i, 10)))
        router.forget(str(i))
    assert taken == REPLICAS * 2


def test_the_fewest_held_tokens_win_not_the_fewest_requests() -> None:
    router = HeldTokenRouter()
    assert [send(router, str(i), prompt(1000 * i, 300)) for i in range(3)] == REPLICAS
    assert send(router, "short", [1]) == "a"  # on ties the one not chosen for longest
    router.holds("0", 40)  # compacted: a has two requests and the least to hold
    assert router.load("a") == 41
    assert send(router, "next", [2]) == "a"


def test_a_prompt_weighs_more_until_its_first_token() -> None:
    router = HeldTokenRouter()
    for i in (0, 1):
        router.add(str(i), prompt(1000 * i, 100))
        router.send(str(i), "a")
    send(router, "2", prompt(2000, 400))
    assert router.load("b") == 400
    assert router.load("a") == 1000  # twice 100 tokens, and four times those to be computed
    router.holds("0", 100)
    router.holds("1", 100)
    assert router.load("a") == 200


def test_an_ended_request_holds_nothing() -> None:
    router = HeldTokenRouter()
    send(router, "0", prompt(0, 100))
    router.forget("0")
    assert router.load("a") == 0
    router.send("0", "b")  # Serve was still on its way with it
    assert router.load("b") == 0


def test_a_request_counts_where_it_went_in_the_end() -> None:
    router = HeldTokenRouter()
    send(router, "0", prompt(0, 100))
    router.send("0", "b")
    router.holds("0", 100)
    assert (router.load("a"), router.load("b")) == (0, 100)


def test_a_cached_prefix_attracts_until_the_difference_is_larger() -> None:
    router = HeldTokenRouter()
    shared = prompt(0, 640)
    assert send(router, "0", [*shared, 7001]) == "a"
    router.forget("0")
    assert send(router, "1", [*shared, 7002]) == "a"  # though it is not its turn
    router.holds("1", 500)
    assert send(router, "2", [*shared, 7003]) == "a"  # 500 held < 640 cached
    router.holds("2", 200)
    assert send(router, "3", [*shared, 7004]) == "b"  # 700 held > 640 cached


def test_a_prefix_counts_only_from_its_start() -> None:
    router = HeldTokenRouter()
    shared = prompt(0, 640)
    send(router, "0", shared)
    router.forget("0")
    assert send(router, "1", [9999, *shared]) == "b"
    router.forget("1")
    router.forget_prefixes()
    assert send(router, "2", shared) == "c"


def test_a_replica_that_is_gone_is_forgotten_with_its_requests_and_prefixes() -> None:
    router = HeldTokenRouter()
    shared = prompt(0, 640)
    send(router, "0", shared)
    router.add("1", shared)
    assert router.rank("1", ["b", "c"])[0] == "b"
    assert router.load("a") == 0
    router.holds("0", 900)  # its last words
    router.forget("0")
    assert router.rank("1", ["a", "b", "c"])[-1] == "c"  # no prefix: order of turns


def test_pieces_join_to_what_was_cut() -> None:
    output = RequestOutput("r", "text", [5, 6, 7], [CompletionOutput(0), CompletionOutput(1)])
    scored: list[dict[int, Logprob] | None] = [None]
    output.outputs[0].logprobs, output.prompt_logprobs = [], scored
    writer, reader = OutputWriter("3"), OutputReader([5, 6, 7])
    joined = reader.join(writer.take_new(output))
    for step in range(4):
        first, second = output.outputs
        first.token_ids += [step, step + 1]
        first.text += f"<{step}>"
        assert first.logprobs is not None
        first.logprobs += [{step: Logprob(-1.0, 1)}, {step + 1: Logprob(-2.0, 2)}]
        if step > 1:
            second.token_ids.append(step)
        scored.append({step: Logprob(-3.0, 1)})
        if step % 2:
            output.compactions.append(Compaction("due", 0.0, 2, 5))
        output.finished = step == 3
        piece = writer.take_new(output)
        assert piece.prompt_token_ids == [] and len(piece.outputs[0].token_ids) == 2
        joined = reader.join(piece)
    assert replace(joined, prompt="text") == replace(output, engine="3")
    assert held_tokens(joined) == 3 + 8 + 2 - 4


def test_engines_add_up() -> None:
    one = EngineStats(
        num_running=1,
        blocks_total=10,
        blocks_free=4,
        compaction_seconds_total=0.5,
        iterations=(1, 2),
        compaction_counts=(CompactionCounts("kara", "due", 1, 2),),
        requests=(RequestStats("r", "kara", 5, 4, 1, 1),),
    )
    both = total([one, replace(one, num_running=2), EngineStats()])
    assert (both.num_running, both.blocks_total, both.blocks_free) == (3, 20, 8)
    assert both.compaction_seconds_total == pytest.approx(1.0)
    assert both.iterations == (2, 4)
    assert len(both.compaction_counts) == len(both.requests) == 2
    assert both.kv_cache_usage == pytest.approx(0.6)
    assert total([]) == EngineStats()
