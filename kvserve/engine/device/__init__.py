"""Copies between host and device, tensor-parallel ranks, memory pages."""
