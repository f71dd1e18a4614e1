"""Generates pages of the docs: ``python -m kvserve.server.reference FOLDER``."""
