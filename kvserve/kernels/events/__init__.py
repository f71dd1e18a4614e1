"""What events do to rows, beside scoring: where entries lie, which move, what is left of others."""
