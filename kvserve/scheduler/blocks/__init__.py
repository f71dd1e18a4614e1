"""Who holds which blocks: tables over one pool, and the prefix cache."""
