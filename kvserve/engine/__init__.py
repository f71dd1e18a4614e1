"""The engine: models, attention, policies, and the loop that runs them."""
