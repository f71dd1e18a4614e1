"""Entries where they lie: read, and moved to the front."""
