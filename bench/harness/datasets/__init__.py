"""Requests to send: tasks, synthetic traffic, files."""
