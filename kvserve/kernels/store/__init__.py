"""New entries to their slots, and every form in which entries are held."""
