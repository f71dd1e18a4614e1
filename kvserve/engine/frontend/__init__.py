"""What users and the server call: prompts in, text out, in front of the core's process."""
