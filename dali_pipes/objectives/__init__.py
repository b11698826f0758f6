"""Keyed transforms of the tokens that a trainer gets, beyond the next token: what they do, as integers."""
