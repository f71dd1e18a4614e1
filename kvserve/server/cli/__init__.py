"""The command line, and what it starts."""

from kvserve.server.cli.commands import main

__all__ = ["main"]
