"""What layers compute beside products and attention."""
