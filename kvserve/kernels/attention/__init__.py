"""Attention over paged entries: the reference and the Triton kernel."""
