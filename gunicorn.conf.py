"""What `gunicorn wsgi:app` reads by itself in this folder: the same as `dataloader api` does, but for its options."""

from dataloader.api.server.gunicorn_config import *  # noqa: F403
