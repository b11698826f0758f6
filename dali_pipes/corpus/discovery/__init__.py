"""From what the user names to the data files, in an order that never varies."""
