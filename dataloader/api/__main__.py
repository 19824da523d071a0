"""`python -m dataloader.api` prints the OpenAPI document, as docs/openapi.json has it."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from dataloader import config
from dataloader.api import create_app
from dataloader.api.v1 import openapi

with redirect_stdout(sys.stderr):  # creating an application may log
    app = create_app(config.load(_env_file=None, dl_db_dsn="postgresql://localhost/none"))
sys.stdout.write(openapi.text(openapi.document(app)))
