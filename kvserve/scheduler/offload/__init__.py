"""Rows that are away: preempted, or saved for a later turn; one owner of host memory."""
