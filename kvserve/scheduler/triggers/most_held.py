"""How much a trigger lets a sequence hold, worked out event by event."""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.triggers.trigger import RowState, Trigger

_EVENTS = 256


def most_held(trigger: Trigger, num_prompt: int, max_len: int, block_size: int) -> int:
    """Most entries held (a mean over layers and heads) from the prompt's end to ``max_len`` tokens.

    After ``_EVENTS`` events it extrapolates the growth over the second half of them.
    """
    uncompressed = int(trigger.start(np.array([num_prompt], np.int32))[0])
    seen = held = 0
    peaks = [(num_prompt, 0)]
    for _ in range(max_len):
        state = RowState.of(num_prompt, seen, held, uncompressed, block_size)
        due = min(int(trigger.next_event(state)[0]), max_len)
        held, seen = held + due - seen, due
        if seen > num_prompt:
            peaks.append((seen, held))
        if seen == max_len:
            return max(most for _, most in peaks)
        if len(peaks) > _EVENTS:
            break
        plan = trigger.plan(RowState.of(num_prompt, seen, held, uncompressed, block_size))
        held, uncompressed = held - int(plan.evicted[0]), int(plan.first_uncompressed_pos[0])
    (before, less), (now, more) = peaks[_EVENTS // 2], peaks[-1]
    return more + (more - less) * (max_len - now) // (now - before)
