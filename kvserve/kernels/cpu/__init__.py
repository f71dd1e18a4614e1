"""Kernels in C++ for CPUs, compiled when they are first asked for."""
