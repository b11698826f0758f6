"""The command line: reports as plain data, and how the terminal shows them."""
