"""Replicas of the engine on Ray Serve."""
