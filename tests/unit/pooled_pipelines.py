"""Pipelines whose library keeps a pool of threads, as polars does: a later fork has the pool without its threads."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dataloader.pipelines import Context, register

_pool = ThreadPoolExecutor(1)


@register("t.pooled")
def pooled(args: dict[str, Any]) -> Iterator[Any]:
    yield {"pid": os.getpid()}
    _pool.submit(int).result()
    yield {"processed": 1, "total": 1}


@register("t.pooled.saving", spares_attempts=True)
def saving(args: dict[str, Any], context: Context) -> Iterator[Any]:
    """Count on from the checkpoint, in two transactions with work in the pool between them."""
    at = (context.checkpoint or {"at": 0})["at"]
    for _ in range(2):
        with context.transaction(), (context.data_dir / "f").open("a") as file:
            at += 1
            context.save({"at": at})
            file.write("x")
        _pool.submit(int).result()
    return at
    yield


@register("t.pooled.stuck")
def stuck(args: dict[str, Any]) -> Iterator[Any]:
    yield {}
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
