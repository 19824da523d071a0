"""The WSGI application for gunicorn: `gunicorn wsgi:app`."""

from dataloader.api import create_app

app = create_app()
