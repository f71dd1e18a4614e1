"""The live page, its files, and the stream that it and `kvserve top` draw from."""
