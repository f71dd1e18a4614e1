"""The loop that schedules and runs steps: requests in, tokens out."""
