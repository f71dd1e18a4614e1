"""Reads flags, the environment and a file into settings."""
