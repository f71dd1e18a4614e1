"""Compression events: which are due, what they take, and when the next ones come."""
