"""Block tables over one pool, and blocks kept for later: prefix cache and continuations."""
