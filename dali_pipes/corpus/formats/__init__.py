"""One module a format: recognize a file, inspect it, and say where its ids are."""
