"""Attention over paged entries: the reference, the CPU's kernel and Triton's."""
