"""Who runs and who waits: rows, the queue, and what rows share or leave in host memory."""
