"""A module that makes a pool and a fork server at its import."""

import multiprocessing
import os
import time
from typing import Any

from squares import square

from dataloader.pipelines import register

SERVED = multiprocessing.get_context("forkserver")
POOL = multiprocessing.get_context("fork").Pool(2)
SERVER = SERVED.Process(target=time.sleep, args=(0,))
SERVER.start()
SERVER.join()


@register("pool_of_the_module")
def pool_of_the_module(args: dict[str, Any]) -> list[int]:
    """Compute by the pool and by a process of the fork server; the result and the pid."""
    child = SERVED.Process(target=time.sleep, args=(0,))
    child.start()
    child.join()
    return [sum(POOL.map(square, range(5))), child.exitcode or 0, os.getpid()]
