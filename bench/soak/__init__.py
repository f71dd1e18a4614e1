"""A server under mixed traffic with faults on purpose: `make soak`."""
