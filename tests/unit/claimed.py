"""Jobs as a worker has claimed them, for tests without a database."""

from typing import Any
from uuid import uuid4

from dataloader.queue.job import Delivery, Job


def job(lock_key: str = "k", **fields: Any) -> Job:
    """The first attempt of a job of this key, with these fields."""
    return Job(uuid4(), "q", "t", "{}", None, lock_key, "", 1, 5, 60, None, 1, "h:1:b")._replace(**fields)


def delivery(keys: str = "k") -> Delivery:
    """A delivery of a job of each of these keys."""
    return Delivery(tuple(map(job, keys)))
