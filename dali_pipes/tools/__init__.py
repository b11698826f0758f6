"""The command line: reports as plain data, and how a terminal shows them."""
