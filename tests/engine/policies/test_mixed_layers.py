"""Policies on models some of whose layers have sliding windows: the conformance matrix over them.

gpt-oss has sinks too, which take part in every softmax.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.policies import test_conformance as matrix
from tests.engine.policies.cases import CASES, Case
from tests.thinning import slow

HERE = [
    case
    for case in CASES
    if case.policy != "long_entries" and case.fields.get("query_source") != "recompute"
]
GPT_OSS, GEMMA = ("gpt-oss", "model", "auto"), ("gemma3", "head", "auto")
OTHERS = [("gpt-oss", "layer", "k8v4"), ("gemma3", "layer", "k4v4"), ("gemma3", "model", "int8")]


lab, labs = matrix.lab, matrix.labs  # its fixtures


@pytest.mark.parametrize(
    "check",
    [
        matrix.test_kept_sets_and_counts,
        matrix.test_entries_are_copied_bit_for_bit,
        matrix.test_with_room_for_everything_nothing_changes,
        matrix.test_mates_chunks_and_blocks_do_not_matter,
        matrix.test_logits_are_those_of_dense_attention_over_the_kept_set,
        matrix.test_scores_are_those_of_the_true_queries_and_keys,
        *slow(matrix.test_guesses_do_not_matter),
    ],
    ids=lambda check: check.__name__[5:],
)
@matrix.matrix([GPT_OSS, GEMMA], HERE, slow=OTHERS)
def test_the_matrix(lab: matrix.Lab, case: Case, check: Callable[[matrix.Lab, Case], None]) -> None:
    check(lab, case)


@matrix.matrix([GPT_OSS], HERE, slow=[GEMMA, *OTHERS])
def test_neither_chunks_nor_a_way_through_host_memory_matter(lab: matrix.Lab, case: Case) -> None:
    matrix.test_chunks_do_not_matter(lab, case, 16)
    matrix.test_a_preempted_sequence_comes_back_from_host_memory(lab, case)


@matrix.matrix([GEMMA], HERE, slow=[GPT_OSS, *OTHERS])
def test_neither_hits_nor_replayed_events_matter(lab: matrix.Lab, case: Case) -> None:
    matrix.test_hits_do_not_matter(lab, case, 16)
    matrix.test_a_preempted_sequence_replays_its_events(lab, case)
