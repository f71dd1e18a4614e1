"""Anthropic's Messages API over chat requests."""
