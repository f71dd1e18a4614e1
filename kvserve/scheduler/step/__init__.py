"""One step: compress, make room, decode, catch up."""
