"""What to keep: one frozen dataclass per policy, pure tensor functions underneath."""
