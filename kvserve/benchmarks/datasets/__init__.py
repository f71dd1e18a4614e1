"""What is sent: tasks, traffic, files."""
