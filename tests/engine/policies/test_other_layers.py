"""Policies on models some of whose layers have sliding windows, keep states, have heads of another
size or read what earlier ones hold: the conformance matrix over the layers that see all tokens.

The reference evicts for real. gpt-oss has sinks too, which take part in every softmax. The
attention of models with states is in float64; the delta rule's modules compute in float32 whatever
they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.policies import test_conformance as matrix
from tests.engine.policies.cases import CASES, Case
from tests.thinning import slow

Check = Callable[[matrix.Lab, Case], None]
HERE = [
    case
    for case in CASES
    if case.policy != "long_entries" and case.fields.get("query_source") != "recompute"
]
BORROWED = [case for case in HERE if case.policy not in ("triattention", "pyramidinfer")]
GPT_OSS, GEMMA = ("gpt-oss", "model", "auto"), ("gemma3", "head", "auto")
OTHERS = [("gpt-oss", "layer", "k8v4"), ("gemma3", "layer", "k4v4"), ("gemma3", "model", "int8")]
STATES, SHARING = ("qwen3_5", "model", "auto"), ("gemma4", "model", "auto")
BY_HEAD = [("qwen3_5", "head", "auto")]
IN_LEVELS = [("qwen3_5", "layer", "int8"), ("qwen3_5", "model", "k8v4")]
SHARING_APART = [("gemma4", "head", "auto"), ("gemma4", "layer", "auto")]


lab, labs = matrix.lab, matrix.labs  # its fixtures


def checks(*wanted: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("check", wanted, ids=lambda check: check.__name__[5:])


EACH: tuple[Check, ...] = (
    matrix.test_kept_sets_and_counts,
    matrix.test_entries_are_copied_bit_for_bit,
    matrix.test_with_room_for_everything_nothing_changes,
    matrix.test_logits_are_those_of_dense_attention_over_the_kept_set,
    matrix.test_scores_are_those_of_the_true_queries_and_keys,
)
MATES = matrix.test_mates_chunks_and_blocks_do_not_matter
REPLAYS = matrix.test_a_preempted_sequence_replays_its_events


@checks(*EACH, MATES, *slow(matrix.test_guesses_do_not_matter))
@matrix.matrix([GPT_OSS, GEMMA], HERE, slow=OTHERS)
def test_windows(lab: matrix.Lab, case: Case, check: Check) -> None:
    check(lab, case)


@matrix.matrix([GPT_OSS], HERE, slow=[GEMMA, *OTHERS])
def test_neither_chunks_nor_a_way_through_host_memory_matter(lab: matrix.Lab, case: Case) -> None:
    matrix.test_chunks_do_not_matter(lab, case, 16)
    matrix.test_a_preempted_sequence_comes_back_from_host_memory(lab, case)


@matrix.matrix([GEMMA], HERE, slow=[GPT_OSS, *OTHERS])
def test_neither_hits_nor_replayed_events_matter(lab: matrix.Lab, case: Case) -> None:
    matrix.test_hits_do_not_matter(lab, case, 16)
    matrix.test_a_preempted_sequence_replays_its_events(lab, case)


@checks(*EACH)
@matrix.matrix([STATES], BORROWED, slow=[*BY_HEAD, *IN_LEVELS])
def test_states(lab: matrix.Lab, case: Case, check: Check) -> None:
    check(lab, case)


@checks(MATES, REPLAYS)
@matrix.matrix([STATES], BORROWED, slow=BY_HEAD)
def test_neighbours_of_states(lab: matrix.Lab, case: Case, check: Check) -> None:
    """Not in levels: transformers' products depend on other rows in their last bits."""
    check(lab, case)


@checks(*EACH, MATES, REPLAYS)
@matrix.matrix([SHARING], BORROWED, slow=SHARING_APART)
def test_two_sizes_of_heads(lab: matrix.Lab, case: Case, check: Check) -> None:
    """The layers that share entries see what is kept of them."""
    check(lab, case)
