"""The configuration of a plain `gunicorn wsgi:app`: that of `dataloader api`, without the command's options."""

from dataloader.api.server.gunicorn_config import *  # noqa: F403
