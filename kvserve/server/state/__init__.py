"""What the routes share: the engine, its open requests, errors, metrics."""
