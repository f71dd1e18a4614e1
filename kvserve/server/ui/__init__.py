"""The live page, its files, and the event stream that it reads."""
