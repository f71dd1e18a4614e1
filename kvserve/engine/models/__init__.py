"""Decoders and their checkpoints."""
