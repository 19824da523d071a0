"""The value that a pipeline returns: it becomes the results of the run's jobs, or an error that names its fault."""

import json
from typing import Any

import pytest
from claimed import delivery

from dataloader import pipelines
from dataloader.farm.runner import returned
from dataloader.pipelines import Context, on_error, register
from dataloader.queue.job import End, Outcome, decide
from dataloader.testing import run

pytestmark = pytest.mark.usefixtures("own_registry")

SECRET = "s3cret-canary-91"


def outcome(value: Any, keys: str = "k", batch_size: int | None = None, most_kb: int = 1) -> Outcome:
    pipelines.register("t", batch_size=batch_size)(lambda args: None)
    return returned(delivery(keys), pipelines.resolve("t"), value, {"last": "report"}, most_kb)


def results(value: Any, keys: str, batch_size: int | None = 9) -> list[str | None]:
    return [end and end.result for end in decide(delivery(keys), outcome(value, keys, batch_size))]


@pytest.mark.parametrize(
    ("value", "progress", "result"),
    [
        (None, {"last": "report"}, None),
        ([1], {"last": "report"}, "[1]"),
        ("", {"last": "report"}, '""'),
        (0, {"last": "report"}, "0"),
        (False, {"last": "report"}, "false"),
        ({}, {}, "{}"),
        ({"n": 1}, {"n": 1}, '{"n": 1}'),
    ],
)
def test_a_run_has_a_result_unless_it_returned_none_and_a_dict_is_its_progress_too(
    value: Any, progress: Any, result: str | None
) -> None:
    assert outcome(value) == Outcome(End.DONE, progress=json.dumps(progress), result=result)


@pytest.mark.parametrize(
    ("value", "keys", "found"),
    [
        ([1], "kkl", ["[1]"] * 3),
        ({"n": 1}, "kkl", ['{"n": 1}'] * 3),
        ({"k": [1], "l": 0}, "kkl", ["[1]", "[1]", "0"]),
        ({"l": "x"}, "kl", [None, '"x"']),
        ({"k": None}, "kl", [None, None]),
        ({}, "kl", [None, None]),
        ({"k": 1, "other": 2}, "kl", ['{"k": 1, "other": 2}'] * 2),
    ],
)
def test_a_dict_of_keys_of_a_batch_has_a_result_for_each_and_any_other_value_is_that_of_all(
    value: Any, keys: str, found: list[str | None]
) -> None:
    assert results(value, keys) == found


def test_one_wrong_result_of_a_batch_is_the_error_of_its_key_alone() -> None:
    found = outcome({"k": object(), "l": "x" * 2_000, "m": 3}, "klm", 9)
    assert found.end is End.DONE
    assert {key: each.end for key, each in found.by_key.items()} == {
        "k": End.PERMANENT,
        "l": End.PERMANENT,
        "m": End.DONE,
    }
    assert [end and end.verb for end in decide(delivery("klm"), found)] == ["fail", "fail", "succeed"]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("x" * 300_000, "the pipeline returned 300,002 bytes of JSON, and DL_RESULT_KB=256 allows 262,144: write large"
         " results to the target or to a file, and return their place"),
        ({"rows": [object()]}, "what the pipeline returned is not JSON: result.rows[0] is of the type builtins.object;"
         " return dicts, lists, texts, numbers, booleans and None (sets, dataclasses, Enums, numpy's numbers,"
         " times, decimals, UUIDs and paths have a form too)"),
    ],
)  # fmt: skip
def test_a_wrong_result_fails_the_job_at_once_and_hooks_hear_of_it(value: Any, error: str) -> None:
    register("t.wrong")(lambda args: value)
    heard: list[BaseException] = []
    on_error(lambda run, exc: heard.append(exc))
    result = run("t.wrong")
    assert (result.status, result.error, result.attempts, result.result) == ("failed", error, 1, None)
    assert [str(exc) for exc in heard] == [error]


def test_results_and_progress_are_stored_as_they_are_and_the_error_of_a_wrong_one_is_masked() -> None:
    class Rude:
        def __str__(self) -> str:
            raise ValueError(SECRET)

    @register("t.tells")
    def tells(args: dict[str, Any], context: Context) -> Any:
        context.progress({"token": SECRET})
        return {"token": SECRET, "said": f"it was {SECRET}", "bad": {Rude(): 1} if args["bad"] else None}

    result = run(tells, {"password": SECRET, "bad": False})
    assert result.result == {"token": SECRET, "said": f"it was {SECRET}", "bad": None}
    assert result.progress[0] == {"token": SECRET}
    result = run(tells, {"password": SECRET, "bad": True})
    assert result.status == "failed"
    assert SECRET not in (result.error or "")
    assert "not JSON: result.bad cannot be read (ValueError)" in (result.error or "")
