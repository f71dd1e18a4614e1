"""The commands `bench`, `eval`, `inspect` and `tune`."""
