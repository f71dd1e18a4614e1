"""Which sequences run, in which blocks, and when they are compacted. Numpy and stdlib only."""
