"""The command line: a command for each process, and what people need beside them."""
