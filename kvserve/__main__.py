"""``python -m kvserve`` is the ``kvserve`` command."""

from kvserve.server.cli.commands import main

if __name__ == "__main__":
    main()
