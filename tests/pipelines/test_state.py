"""`context.state`, `context.create` and `context.secret`: what a pipeline keeps in the target, and its secrets."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from judging import Command, Load, Rows, fails_for_good
from patience import PATIENCE

from dataloader import config, log
from dataloader.cli.direct import person
from dataloader.exits import EXIT_FAILED
from dataloader.farm.runner import Runner
from dataloader.log import masking
from dataloader.pipelines import Context, register, state

pytestmark = pytest.mark.usefixtures("own_registry")
NAME = "shop.orders"


@pytest.fixture
def task() -> str:
    """A pipeline that counts in its state and in its table, three parts a run."""

    @register("count")
    def count(args: dict[str, Any], context: Context) -> Iterator[None]:
        context.create("CREATE TABLE IF NOT EXISTS t (n int PRIMARY KEY)")
        kept = context.state(NAME)
        begin = kept.value or 0
        for n in range(begin, begin + 3):
            with context.transaction() as conn:
                conn.execute("INSERT INTO t VALUES (%s)", (n,))
                kept.set(n + 1, conn)
                yield

    return "count"


@pytest.mark.parametrize("point", range(1, 9))
def test_state_and_data_commit_together_after_a_kill_at_any_point(task: str, job: Load, rows: Rows, point: int) -> None:
    assert job(task, crash_at=point).status == "succeeded"
    [(most, number)] = rows("SELECT max(n), count(*) FROM t")
    assert rows("SELECT value, changed_by FROM dl_state") == [(most + 1, None)]
    assert number == most + 1 >= 3


def test_a_state_that_a_person_has_set_is_not_overwritten_by_a_run_that_began_before(
    task: str, job: Load, rows: Rows, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle(self: state.State, value: Any, conn: Any) -> None:
        if value == 2 and rows("SELECT value FROM dl_state") == [(1,)]:
            with psycopg.connect(dsn) as other:
                state.give(other, NAME, 10, "ann@vm")
        usual(self, value, conn)

    usual = state.State.set
    monkeypatch.setattr(state.State, "set", meddle)
    result = job(task)
    assert (result.status, result.attempts) == ("succeeded", 2)
    assert result.runs[0].error == "the state shop.orders has changed meanwhile: the next run begins at its new value"
    assert rows("SELECT n FROM t ORDER BY n") == [(0,), (10,), (11,), (12,)]
    assert rows("SELECT value, changed_by, job_id IS NULL FROM dl_state") == [(13, None, False)]


def test_a_value_may_be_changed_in_place(context: Context, rows: Rows) -> None:
    kept = context.state(NAME)
    value: dict[str, list[int]] = {"seen": []}
    for n in range(2):
        value["seen"].append(n)
        with context.transaction() as conn:
            kept.set(value, conn)
    again = context.state(NAME)
    again.value["seen"].clear()
    with context.transaction() as conn:
        again.set(again.value, conn)
    assert rows("SELECT value FROM dl_state") == [({"seen": []},)]


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"x"])
def test_a_state_is_json(context: Context, value: Any) -> None:
    kept = context.state(NAME)
    with pytest.raises(state.PermanentError, match="a state should be a value of JSON"), context.transaction() as conn:
        kept.set(value, conn)
    with pytest.raises(state.PermanentError, match="the name of a state should have 1 to 200 printable characters"):
        context.state("a\nb")


def test_tables_that_runs_create_at_the_same_time_are_created_once(context: Context, rows: Rows) -> None:
    """Without the lock, most rounds of IF NOT EXISTS fail in one of the sessions."""
    errors: list[BaseException] = []

    def create(barrier: threading.Barrier, name: str) -> None:
        try:
            barrier.wait(PATIENCE)
            context.create(f"CREATE TABLE IF NOT EXISTS {name} (id int PRIMARY KEY)")
        except BaseException as e:
            errors.append(e)

    for n in range(5):
        barrier = threading.Barrier(4)
        threads = [threading.Thread(target=create, args=(barrier, f"made_{n}")) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    with pytest.raises(state.PermanentError, match=r"context\.create: syntax error"):
        context.create("CREATE TABEL t (id int)")


# --- secrets ---


@pytest.fixture
def asking() -> str:
    @register("ask")
    def ask(args: dict[str, Any], context: Context) -> str:
        value = context.secret(args["name"])
        if args.get("fails"):
            raise RuntimeError(f"the shop refuses {value}")
        return value[:3]

    return "ask"


def test_a_secret_is_faked_in_tests_and_masked_in_errors(asking: str, job: Load) -> None:
    given = {"shop_token": "canary-secret-5d1"}
    assert job(asking, {"name": "shop_token"}, secrets=given).result == "can"
    result = job(asking, {"name": "shop_token", "fails": True}, secrets=given, max_attempts=1)
    assert (result.error or "").startswith("RuntimeError: the shop refuses ***\n")
    assert "canary" not in str(result.error)


def test_a_missing_secret_fails_for_good_and_says_where_it_belongs(asking: str, job: Load) -> None:
    where = "set DL_SECRET_SHOP_TOKEN for the workers, or write the file shop_token in the folder DL_SECRETS_DIR"
    fails_for_good(job(asking, {"name": "shop_token"}), f"the secret shop_token is missing: {where}")


def test_a_secret_is_in_the_environment_or_the_file_or_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "shop_token").write_text("of the folder\n")
    asked = Runner(config.load(), "").secret
    assert asked("shop_token") is None
    monkeypatch.setenv("DL_SECRETS_DIR", str(tmp_path / "secrets"))
    assert asked("shop_token") == "of the folder"
    (tmp_path / ".env").write_text("DL_SECRET_SHOP_TOKEN='of the file'\n")
    assert asked("shop_token") == "of the file"
    monkeypatch.setenv("DL_SECRET_SHOP_TOKEN", "canary-secret-77a")
    assert asked("shop_token") == "canary-secret-77a"
    assert config.misspelt() == []
    masking.learn_configured(config.load())
    assert log.masked("it is canary-secret-77a") == "it is ***"
    with pytest.raises(ValueError, match="lower-case letters"):
        asked("../shop")


# --- the command ---


def test_a_person_lists_shows_sets_and_resets_states(command: Command, rows: Rows) -> None:
    assert command("state", "list").exit_code == 0
    assert "there is no state crm:t" in command("state", "show", "crm:t").output
    assert command("state", "set", "crm:t", '"2026-01-31"').output == "the state crm:t is set\n"
    assert command("state", "show", "crm:t").output == '"2026-01-31"\n'
    [row] = json.loads(command("state", "list", "--json").output)["states"]
    assert (row["name"], row["value"], row["changed_by"]) == ("crm:t", "2026-01-31", person())
    assert '"2026-01-31"' in command("state", "list").output
    assert command("state", "reset", "crm:t").exit_code == 0
    assert rows("SELECT value, changed_by FROM dl_state") == [(None, person())]
    assert command("state", "reset", "crm:u").exit_code == EXIT_FAILED
    assert "should be JSON" in command("state", "set", "crm:t", "2026-01-31").output
