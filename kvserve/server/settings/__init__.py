"""Flags, environment and files, read into settings."""
