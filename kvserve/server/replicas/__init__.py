"""Engines on Ray Serve."""
