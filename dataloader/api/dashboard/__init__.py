"""The pages for people, made on the server."""
