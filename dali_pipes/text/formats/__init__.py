"""Formats of text files: one module each, listed in `registry`."""
