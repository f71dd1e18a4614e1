"""Compression events: who is due, what it takes, and when the next one comes."""
