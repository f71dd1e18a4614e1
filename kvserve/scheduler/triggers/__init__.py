"""When events are due, and what each takes of a row."""
