"""What policies are put together from: arguments, what is said of them, shares of a budget."""
