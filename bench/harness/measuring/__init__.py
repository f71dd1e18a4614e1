"""Runs of engines and servers, and their figures."""
