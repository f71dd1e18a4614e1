"""What scheduler, engine and runner tell each other."""
