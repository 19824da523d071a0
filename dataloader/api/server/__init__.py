"""The API as a process: gunicorn, health, metrics, the audit log."""
