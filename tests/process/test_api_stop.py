"""The API's end: at once, also when it is told to stop while its workers are only starting."""

from __future__ import annotations

import signal
import time

import pytest
from farming import Farm, until


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.02, 0.04, 0.06, 0.1])
def test_a_term_while_the_workers_are_forked_is_not_lost(farm: Farm, free_port: int, delay: float) -> None:
    """Otherwise gunicorn waits all of its graceful timeout, 30 s, for the worker that never heard it."""
    program = farm.start("api --processes 4", app_port=free_port)
    until(lambda: program.events("Using worker: dataloader.api.server.slow_clients.BufferingWorker"))
    time.sleep(delay)  # into the forks, at different places
    program.signal(signal.SIGTERM)
    assert program.process.wait(28) == 0
