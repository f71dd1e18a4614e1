"""Scores of cached entries, and what is worked out from them."""
