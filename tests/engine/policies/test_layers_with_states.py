"""Policies on a model some of whose layers keep states: the conformance matrix over the others.

The reference evicts for real. Its attention is in float64; the delta rule's modules compute in
float32 whatever they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.policies import test_conformance as matrix
from tests.engine.policies.cases import Case
from tests.engine.policies.test_mixed_layers import HERE

CASES_HERE = [case for case in HERE if case.policy not in ("triattention", "pyramidinfer")]
SPECS = [("qwen3_5", "model", "auto")]
BY_HEAD = [("qwen3_5", "head", "auto")]
IN_LEVELS = [("qwen3_5", "layer", "int8"), ("qwen3_5", "model", "k8v4")]


lab, labs = matrix.lab, matrix.labs  # its fixtures


@pytest.mark.parametrize(
    "check",
    [
        matrix.test_kept_sets_and_counts,
        matrix.test_entries_are_copied_bit_for_bit,
        matrix.test_with_room_for_everything_nothing_changes,
        matrix.test_logits_are_those_of_dense_attention_over_the_kept_set,
        matrix.test_scores_are_those_of_the_true_queries_and_keys,
    ],
    ids=lambda check: check.__name__[5:],
)
@matrix.matrix(SPECS, CASES_HERE, slow=[*BY_HEAD, *IN_LEVELS])
def test_the_matrix(lab: matrix.Lab, case: Case, check: Callable[[matrix.Lab, Case], None]) -> None:
    check(lab, case)


@pytest.mark.parametrize(
    "check",
    [
        matrix.test_mates_chunks_and_blocks_do_not_matter,
        matrix.test_a_preempted_sequence_replays_its_events,
    ],
    ids=lambda check: check.__name__[5:],
)
@matrix.matrix(SPECS, CASES_HERE, slow=BY_HEAD)
def test_neighbours(lab: matrix.Lab, case: Case, check: Callable[[matrix.Lab, Case], None]) -> None:
    """Not in levels: transformers' products depend on other rows in their last bits."""
    check(lab, case)
