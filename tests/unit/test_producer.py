"""producer and queue: the pure parts of adding many jobs at once."""

import json
from typing import Any
from unittest.mock import Mock

import pytest

from dataloader.queue import enqueue, new_job
from dataloader.queue.enqueue import NewJob, merged
from dataloader.queue.new_job import columns_of


@pytest.mark.parametrize(
    ("values", "one"),
    [
        ([], False),
        ([7], True),
        (["a", "a"], True),
        ([None, None], True),
        (["a", None], False),
        ([1, True], False),  # Python equates it with an integer, JSON does not
        ([1, 1.0], False),
    ],
)
def test_only_what_is_the_same_becomes_one(values: list[Any], one: bool) -> None:
    assert merged(values) == (values[:1] if one else values)
    assert all(type(a) is type(b) for a, b in zip(merged(values), values, strict=False))


ODD = [{"a": '},{"b":1'}, {",{": [{}, {"a": [1, {"b": None}]}]}, {}, {"a\n\t": "\\N\x7f\u2028🚀"}, {"n": 10**30}]


@pytest.mark.parametrize(
    "objects", [[], [{}], [{}, {}], [{"a": 1, "b": "}{"}] * 3, ODD, ODD[:1], ODD[1:2] * 2, ODD[3:]]
)
def test_each_object_is_json_of_its_own(objects: list[dict[str, Any]]) -> None:
    texts = enqueue.as_texts(objects)
    assert texts == [enqueue.as_json(each) for each in objects]
    assert [json.loads(text) for text in texts] == objects


def test_one_object_that_is_not_json_and_there_is_none() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        enqueue.as_texts([{}, {"a": float("nan")}])


def test_columns_have_the_defaults_of_a_new_job() -> None:
    documents = [{"queue": "q", "task": "t", "lock_key": f"k{n}"} for n in range(3)]
    jobs = [NewJob(**document) for document in documents]
    assert columns_of(documents, lease_ttl_sec=60) | {"trace": [None]} == enqueue.columns(jobs)
    assert columns_of(documents, lease_ttl_sec=7)["lease_ttl_sec"] == [7]


def test_the_args_of_a_body_are_not_read_once_more_unless_hooks_have_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards have measured the whole body, and large args take half of the time of all other checks."""
    documents = [{"queue": "q", "task": "t", "lock_key": "k", "args": {"a": [[]] * 99}}]
    look = Mock(return_value=False)
    monkeypatch.setattr(new_job, "is_deep", look)
    assert columns_of(documents, lease_ttl_sec=60)
    assert not look.called
    monkeypatch.setattr(new_job, "AROUND_ENQUEUE", [lambda job: job])
    assert columns_of(documents, lease_ttl_sec=60)
    assert look.called
