"""Splits the text of an answer into reasoning, tool calls and content."""
