"""A server under mixed traffic and injected faults: `make soak`."""
