"""The most entries that a sequence will hold, by its trigger alone; shown at start-up."""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.triggers.trigger import RowState, Trigger

_EVENTS = 256


def most_held(trigger: Trigger, num_prompt: int, max_len: int, block_size: int) -> int:
    """Most entries held (a mean over layers and heads) from the prompt's end to ``max_len`` tokens.

    After ``_EVENTS`` events it extrapolates the growth over the second half of them.
    """
    prompt = np.array([num_prompt], np.int32)
    first_uncompressed_pos = trigger.start(prompt)
    seen = held = 0
    peaks = [(num_prompt, 0)]
    for _ in range(max_len):
        state = _state(prompt, seen, held, first_uncompressed_pos, block_size)
        due = min(int(trigger.next_event(state)[0]), max_len)
        held, seen = held + due - seen, due
        if seen > num_prompt:
            peaks.append((seen, held))
        if seen == max_len:
            return max(most for _, most in peaks)
        if len(peaks) > _EVENTS:
            break
        plan = trigger.plan(_state(prompt, seen, held, first_uncompressed_pos, block_size))
        held, first_uncompressed_pos = held - int(plan.evicted[0]), plan.first_uncompressed_pos
    (before, less), (now, more) = peaks[_EVENTS // 2], peaks[-1]
    return more + (more - less) * (max_len - now) // (now - before)


def _state(
    prompt: IntArray, seen: int, held: int, first_uncompressed_pos: IntArray, block_size: int
) -> RowState:
    return RowState(
        prompt,
        np.array([seen], np.int32),
        np.array([held], np.int32),
        first_uncompressed_pos,
        block_size,
    )
