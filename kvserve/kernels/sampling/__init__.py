"""Tokens from logits."""
