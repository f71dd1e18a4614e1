"""The building blocks of policies: arguments, their descriptions, shares of a budget."""
