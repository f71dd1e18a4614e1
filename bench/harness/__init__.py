"""Benchmarks: throughput and accuracy of policies, and the tasks that ship."""
