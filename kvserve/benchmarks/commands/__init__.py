"""What `bench`, `eval`, `inspect` and `tune` do."""
