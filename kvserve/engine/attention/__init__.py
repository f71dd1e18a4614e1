"""Attention over paged blocks: one protocol, several implementations."""
