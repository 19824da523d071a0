"""The queue in PostgreSQL: its rows, the statements that change them, the rules they meet. No processes."""
