"""The text of an answer taken apart: reasoning, tool calls, content."""
