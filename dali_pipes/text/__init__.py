"""Text and conversations on their way to token ids."""
