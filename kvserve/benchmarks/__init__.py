"""Throughput and accuracy of policies, measured in one process, and the tasks that ship."""
