"""Serving simulated from the cost of a step."""
