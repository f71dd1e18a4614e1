"""The commands `bench`, `calibrate`, `eval`, `inspect` and `tune`."""
