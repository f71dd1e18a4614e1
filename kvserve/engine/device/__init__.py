"""What the machine offers: copies, ranks, pages."""
