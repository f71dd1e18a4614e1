"""Compression events on the device: gather, score, select, move."""
