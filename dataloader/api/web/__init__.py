"""The parts that all endpoints share: authorisation, problems, database sessions, long polls."""
