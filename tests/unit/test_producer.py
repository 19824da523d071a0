"""producer and queue: what is pure in adding many jobs at once."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

import pytest

from dataloader import queue
from dataloader.producer import columns_of, is_deep
from dataloader.queue import NewJob, merged


@pytest.mark.parametrize(
    ("values", "one"),
    [
        ([], False),
        ([7], True),
        (["a", "a"], True),
        ([None, None], True),
        (["a", None], False),
        ([1, True], False),  # equal in Python, but no integer in JSON
        ([1, 1.0], False),
    ],
)
def test_only_what_is_the_same_becomes_one(values: list[Any], one: bool) -> None:
    assert merged(values) == (values[:1] if one else values)
    assert all(type(a) is type(b) for a, b in zip(merged(values), values, strict=False))


def test_columns_have_the_defaults_of_a_new_job() -> None:
    documents = [{"queue": "q", "task": "t", "lock_key": f"k{n}"} for n in range(3)]
    jobs = [NewJob(**document) for document in documents]
    assert columns_of(documents, lease_ttl_sec=60) == queue.columns(jobs)
    assert columns_of(documents, lease_ttl_sec=7)["lease_ttl_sec"] == [7]


@pytest.mark.parametrize(
    ("value", "room", "deep"),
    [("text", 0, False), ({}, 0, True), ({}, 1, False), ({"a": [1]}, 1, True), ([[], {"a": 1}], 2, False)],
)
def test_depth_counts_objects_and_arrays(value: Any, room: int, deep: bool) -> None:
    assert is_deep(value, room) is deep


def test_new_ids_are_of_version_7_and_grow() -> None:
    before = time.time_ns() // 1_000_000
    ids = queue._new_ids(3_000)
    assert ids == sorted(set(ids))
    assert {(job_id.version, job_id.variant) for job_id in ids} == {(7, UUID(int=1 << 63).variant)}
    assert before <= ids[0].int >> 80 <= ids[-1].int >> 80 <= time.time_ns() // 1_000_000 + 4
