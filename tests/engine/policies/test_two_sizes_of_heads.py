"""Policies on a model whose layers with windows have other heads than those that see all tokens,
and whose last layers read what earlier ones hold: the conformance matrix over the layers that hold
what all tokens see.

The reference evicts for real, and the layers that share entries see what is kept of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.policies import test_conformance as matrix
from tests.engine.policies.cases import Case
from tests.engine.policies.test_layers_with_states import CASES_HERE

SPECS = [("gemma4", "model", "auto")]
OTHERS = [("gemma4", "head", "auto"), ("gemma4", "layer", "auto")]


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
        matrix.test_a_preempted_sequence_replays_its_events,
    ],
    ids=lambda check: check.__name__[5:],
)
@matrix.matrix(SPECS, CASES_HERE, slow=OTHERS)
def test_the_matrix(lab: matrix.Lab, case: Case, check: Callable[[matrix.Lab, Case], None]) -> None:
    check(lab, case)
