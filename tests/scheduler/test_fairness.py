"""Clients take turns: whom a step admits, and how much of it a long prompt may have."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.rows.queue import WaitingQueue
from tests.scheduler.traffic import Loop, make_scheduler, make_sequence


def sequence(seq_id: int, client: str, prompt: int = 8, output: int = 4) -> Sequence:
    seq = make_sequence(seq_id, prompt, output, policy=0, first=2 + seq_id)
    seq.client = client
    return seq


@pytest.mark.parametrize("what", ["rows", "blocks"])
def test_a_client_without_a_row_does_not_wait_for_ends(what: str) -> None:
    """The client that holds most rows loses its newest; who gave way comes back."""
    rows, blocks = (4, 120) if what == "rows" else (16, 20)
    loop = Loop(make_scheduler(blocks, max_num_seqs=rows, prefix_caching=False))
    scheduler = loop.scheduler
    scheduler.add(sequence(0, "early", 4, 60))
    for seq_id in range(1, 10):
        scheduler.add(sequence(seq_id, "flood", 4, 60))
    for _ in range(6):
        loop.step()
    held = [seq for seq in scheduler.running if seq.client == "flood"]
    plain = [sequence(10, "plain", 8, 4), sequence(11, "plain", 8, 4)]
    for seq in plain:
        scheduler.add(seq)
    for _ in range(1 if what == "rows" else 4):
        loop.step()
        if plain[0] in scheduler.running:
            break
    assert plain[0] in scheduler.running
    now = [seq for seq in scheduler.running if seq.client == "flood"]
    assert now == held[: len(now)] and 0 < len(now) < len(held), "the newest leave"
    assert plain[1] not in scheduler.running or what == "blocks", "one row is not none"
    assert scheduler.running[0].seq_id == 0
    assert len(loop.drain()) == 12


def test_a_second_request_does_not_wait_behind_a_crowd() -> None:
    """A client with a stream gets a row for a question, while another holds all the others."""
    loop = Loop(make_scheduler(400, max_num_seqs=12, prefix_caching=False))
    scheduler = loop.scheduler
    scheduler.add(sequence(0, "plain", 4, 60))
    for seq_id in range(1, 30):
        scheduler.add(sequence(seq_id, "flood", 4, 60))
    for _ in range(4):
        loop.step()
    assert Counter(seq.client for seq in scheduler.running) == {"plain": 1, "flood": 11}
    question = sequence(30, "plain", 8, 4)
    scheduler.add(question)
    loop.step()
    assert question in scheduler.running and scheduler.totals.preemptions_total == 1
    assert len(loop.drain()) == 31


def test_two_crowds_share_the_rows_and_stay_there() -> None:
    loop = Loop(make_scheduler(400, max_num_seqs=12, prefix_caching=False))
    scheduler = loop.scheduler
    for seq_id in range(30):
        scheduler.add(sequence(seq_id, "early", 4, 12))
    for _ in range(4):
        loop.step()
    for seq_id in range(30, 60):
        scheduler.add(sequence(seq_id, "late", 4, 12))
    for _ in range(6):
        loop.step()
    held = Counter(seq.client for seq in scheduler.running)
    assert min(held.values()) >= 4, held
    assert len(loop.drain()) == 60
    assert scheduler.totals.preemptions_total <= 12, "a row changes hands once, not to and fro"


def test_nobody_makes_way_for_a_lower_priority() -> None:
    loop = Loop(make_scheduler(120, max_num_seqs=2, prefix_caching=False))
    scheduler = loop.scheduler
    for seq_id in range(2):
        scheduler.add(sequence(seq_id, "flood", 4, 20))
    loop.step()
    low = sequence(2, "plain", 4, 4)
    low.priority = 1
    scheduler.add(low)
    for _ in range(5):
        loop.step()
    assert low not in scheduler.running and not scheduler.totals.preemptions_total
    assert len(loop.drain()) == 3


@pytest.mark.parametrize(("client", "steps"), [("other", 1), ("flood", 3)])
def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(client: str, steps: int) -> None:
    """Unless both are of one client."""
    loop = Loop(make_scheduler(120, max_num_batched_tokens=16, prefix_caching=False))
    scheduler = loop.scheduler
    scheduler.add(sequence(0, "flood", 60, 4))
    loop.step()
    short = sequence(1, client, 6, 4)
    scheduler.add(short)
    waited = 0
    while not any(seq is short for seq in scheduler.running):
        output, _ = loop.step()
        waited += 1
    assert waited == steps
    assert output.num_tokens == 16
    loop.drain()


def test_prompts_leave_room_in_steps_that_decode() -> None:
    loop = Loop(make_scheduler(120, max_prefill_tokens=5, prefix_caching=False))
    scheduler = loop.scheduler
    scheduler.add(sequence(0, "", 30, 30))
    output, _ = loop.step()
    assert (output.num_tokens, output.num_decoding) == (30, 0), "nobody waits for this step"
    scheduler.add(sequence(1, "", 12, 4))
    outputs = [loop.step()[0] for _ in range(4)]
    found = [(int(each.prefill.lengths.sum()), each.num_decoding) for each in outputs]
    assert found == [(5, 1), (5, 1), (2, 1), (0, 2)]


def test_the_queue_is_exact_and_forgets_who_has_left() -> None:
    """Against the definition, over random arrivals, aborts, admissions, preemptions and ends."""
    rng = random.Random(1)
    queue = WaitingQueue(3)
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    served: Counter[str] = Counter()
    now = arrivals = 0

    def expected() -> Sequence | None:
        rows = Counter(seq.client for seq in running)
        heads: dict[str, Sequence] = {}
        for seq in sorted(waiting, key=lambda seq: (seq.priority, seq.arrival)):
            heads.setdefault(seq.client, seq)
        able = [seq for name, seq in heads.items() if rows[name] < 3]
        return min(
            able,
            key=lambda seq: (
                *(seq.priority, rows[seq.client].bit_length(), not seq.replay_until),
                *(0 if seq.replay_until else served[seq.client], seq.arrival),
            ),
            default=None,
        )

    for _ in range(4000):
        draw, first = rng.random(), queue.first
        assert first is expected()
        if draw < 0.4:
            seq = sequence(arrivals, str(rng.randrange(6)))
            seq.arrival, seq.priority = arrivals, rng.randrange(2)
            arrivals += 1
            if not any(other.client == seq.client for other in waiting):
                known = any(other.client == seq.client for other in running)
                served[seq.client] = max(served[seq.client], now) if known else now
            queue.add(seq)
            waiting.append(seq)
        elif draw < 0.45 and waiting:
            queue.remove(waiting.pop(rng.randrange(len(waiting))))
        elif draw < 0.75 and first is not None:
            tokens = rng.randrange(50)
            now = max(now, served[first.client])
            served[first.client] += tokens
            waiting.remove(first)
            running.append(first)
            queue.admit(first, tokens)
        elif draw < 0.8 and running:
            seq = running.pop(rng.randrange(len(running)))
            if not any(other.client == seq.client for other in waiting):
                served[seq.client] = max(served[seq.client], now)
            seq.replay_until = 1
            waiting.append(seq)
            queue.put_back(seq)
        elif running:
            seq, tokens = running.pop(rng.randrange(len(running))), rng.randrange(50)
            served[seq.client] += tokens
            queue.count_ended(seq, tokens)
        queue.check_integrity(running)
        assert len(queue) == len(waiting)
    for seq in waiting:
        queue.remove(seq)
    for seq in running:
        queue.count_ended(seq, 0)
    assert not queue and queue.first is None and not queue._ranks
    queue.check_integrity([])
