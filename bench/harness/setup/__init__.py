"""Settings that the commands share."""
