"""What layers compute beside attention: products, norms, rotation, activations, states."""
