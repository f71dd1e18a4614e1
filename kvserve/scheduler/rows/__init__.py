"""Running rows, the waiting queue, and what rows share or leave in host memory."""
