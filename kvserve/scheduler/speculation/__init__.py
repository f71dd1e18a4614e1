"""What rows guess of their next tokens, and how many guesses a step verifies."""
