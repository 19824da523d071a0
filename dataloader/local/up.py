"""PROCESS: `dataloader up` runs a farm on this machine: it starts the parts, watches them, and stops them.

The parts are the three programs that supervisord runs elsewhere, and the embedded PostgreSQL when no database is
configured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from dataloader import check, config, embedded, periods
from dataloader.farm.process import EXIT_CANNOT_START, EXIT_FAILED, EXIT_OK, Signals, kill_group, now, outcome
from dataloader.local import ports
from dataloader.local.announcement import Announcement
from dataloader.local.parts import Part, Postgres, Program, command, say, warn
from dataloader.local.reload import LOOK_SEC, Reload
from dataloader.queue import db, migrations

HANDOVER_WITHIN = 3.0  # seconds for a previous `up` to end
CHECKED_WITHIN = periods.seconds("CHECKED_WITHIN", 60.0)  # seconds for the imports of the users' modules
API_STOP_SEC = periods.seconds("API_STOP_SEC", 35.0)  # gunicorn answers the requests in flight within 30 s
REAPER_STOP_SEC = periods.seconds("REAPER_STOP_SEC", 15.0)
Document = dict[str, Any]  # the report of `dataloader check --json`
STOP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class Refused(Exception):
    """`up` cannot run; the message names the reason and the remedy."""

    status = EXIT_FAILED


class Unfit(Refused):
    """`up` cannot run because of an error that `dataloader check` found; `up` has printed the findings."""

    status = EXIT_CANNOT_START


def run(settings: config.Settings, reloads: bool = False) -> int:
    """Run the farm of `settings` on this machine until SIGINT, SIGTERM or SIGHUP, and return the exit code.

    With `reloads` a change of the users' modules brings workers with the new code, as SIGHUP to `workers` does.
    The code is 0 after a clean stop, 78 when the schema or a program refuses to start with these settings, and 1
    after any other failure; a message on stderr names the reason. The call leaves no process running.
    """
    # nohup ignores HUP, and so does `up` then.
    stop = {number for number in STOP if signal.getsignal(number) is not signal.SIG_IGN}
    signals = Signals({*stop, signal.SIGCHLD})
    cleanup = ExitStack()
    try:
        _prepare(settings, cleanup)
        return _watch(*_start(settings, cleanup, signals, reloads), signals)
    except (Refused, embedded.EmbeddedError, db.Error, OSError) as error:
        warn(str(error))
        return error.status if isinstance(error, Refused) else EXIT_FAILED
    except migrations.SchemaError as error:
        warn(str(error))
        return EXIT_CANNOT_START
    finally:
        cleanup.close()


# Before the start ------------------------------------------------------------------------------------------


def _prepare(settings: config.Settings, cleanup: ExitStack) -> None:
    """Become the only `up` of DL_HOME, wait for the port, make the folders; Refused if that fails."""
    try:
        lock = embedded.take_lock(settings.dl_home / "up.lock", within=HANDOVER_WITHIN)
    except embedded.EmbeddedError as error:
        raise Refused(f"{error}: stop it first, or choose another folder with DL_HOME") from None
    cleanup.callback(embedded.release, lock)
    try:
        ports.wait_for(settings.app_host, settings.app_port)
    except ports.NotFree as error:
        raise Refused(str(error)) from None
    settings.data_dir.mkdir(mode=0o750, parents=True, exist_ok=True)


# The start -------------------------------------------------------------------------------------------------


def _start(
    settings: config.Settings, cleanup: ExitStack, signals: Signals, reloads: bool
) -> tuple[list[Part], Announcement, Reload | None]:
    """Start PostgreSQL if none is configured, migrate the schema, run the checks, start the programs.

    `cleanup` stops the parts in the reverse order: first no new jobs, then the running ones, PostgreSQL last.
    """
    parts: list[Part] = []
    cleanup.callback(say, "dataloader up: stopped")
    dsn = settings.queue_dsn
    if dsn is None:
        postgres = Postgres(settings.dl_home / "postgres", settings.dl_pg_bin)
        _add(postgres, parts, cleanup)
        dsn = postgres.dsn
    migrations.migrate(dsn, schema=settings.pg_schema_queue)
    environment = environment_of_programs(settings, dsn, sys.stdout.isatty())
    if reloads:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a .pyc names its source by second and size: it may hide a change
    report = _check(environment, signals)
    tasks = _print_findings(report)
    workers_stop = settings.dl_drain_sec + settings.dl_kill_grace_sec + 15
    for name, within in (("reaper", REAPER_STOP_SEC), ("workers", workers_stop), ("api", API_STOP_SEC)):
        _add(Program(name, environment, within, reports_ready=name != "api"), parts, cleanup)
    cleanup.callback(say, "dataloader up: stopping, running jobs have time to finish")
    reload = _reload(report, lambda: _check(environment, signals), parts, settings) if reloads else None
    return parts, Announcement(settings, db.shown(dsn), tasks), reload


def _reload(
    report: Document | None, check_again: Callable[[], Document | None], parts: list[Part], settings: config.Settings
) -> Reload:
    names = {"workers", "api"} if settings.hook_modules else {"workers"}  # the API imports DL_HOOKS alone
    return Reload(report["files"] if report else (), check_again, [part for part in parts if part.name in names])


def _add(part: Part, parts: list[Part], cleanup: ExitStack) -> None:
    cleanup.callback(part.stop)
    part.start()
    parts.append(part)


def environment_of_programs(settings: config.Settings, dsn: str, is_terminal: bool) -> dict[str, str]:
    """The programs' environment: ours, and the settings that `up` adds where the user has set none.

    Times are in this machine's zone. With a terminal, logs are lines for people, and metrics and audit go to files.
    """
    # In the environment, since every user of the machine can read a command line.
    ours = {"dl_db_dsn": dsn, "timezone": settings.people_zone}
    if is_terminal:
        ours |= {"local": "1"} | dict.fromkeys(("metric_path", "audit_log_path"), str(settings.dl_home / "log"))
    given = settings.model_fields_set - {"dl_db_dsn"}
    return {**os.environ, **{name.upper(): value for name, value in ours.items() if name not in given}}


def _check(environment: dict[str, str], signals: Signals) -> Document | None:
    """The report of `dataloader check`; None, after a warning, where there is none.

    The check runs in a process of its own, since it imports the users' modules.
    """
    process = subprocess.Popen(
        command("check", "--json"),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=embedded.dies_with_us(signal.SIGKILL),
    )
    until, output = now() + CHECKED_WITHIN, None
    while output is None and now() < until and not signals.received & STOP:
        with suppress(subprocess.TimeoutExpired):
            output = process.communicate(timeout=0.1)[0]
    if output is None:
        kill_group(process.pid)
        process.communicate()
    try:
        report: Document = json.loads(output or b"")
    except ValueError:
        if not signals.received & STOP:
            warn(f"`dataloader check` {outcome(process.returncode)}: run it to see why")
        return None
    return report


def _print_findings(report: Document | None) -> str:
    """Print what the check warns of, and return the known tasks; Unfit when it found an error."""
    findings = report["findings"] if report else []
    for finding in findings:
        if finding["level"] != "ok":
            advice = f"; {finding['advice']}" if finding["advice"] else ""
            warn(f"{finding['level']}: {finding['about']}: {finding['what']}{advice}")
    if any(finding["level"] == "error" for finding in findings):
        raise Unfit("nothing was started; `dataloader check` shows all findings")
    known = [what for finding in findings if (what := finding["what"].removeprefix(check.TASKS)) != finding["what"]]
    return "".join(known)


# The watch -------------------------------------------------------------------------------------------------


def _watch(parts: list[Part], announcement: Announcement, reload: Reload | None, signals: Signals) -> int:
    """Keep the parts running until a signal to stop, print the banner, look for changes; the exit code."""
    while not signals.received & STOP:
        for part in parts:
            part.tick()
        _reap_orphans({part.process.pid for part in parts if part.process})
        if refused := [part.name for part in parts if part.exit_code == EXIT_CANNOT_START]:
            warn(f"{refused[0]} cannot start with these settings; its message above names the reason")
            return EXIT_CANNOT_START
        announcement.look(all(part.is_ready for part in parts))
        if reload and announcement.is_made:
            reload.look()
        idle_sec = LOOK_SEC if reload else 5
        signals.wait(idle_sec if announcement.is_made and not any(part.due for part in parts) else 0.1)
    return EXIT_OK


def _reap_orphans(ours: set[int]) -> None:
    """Take the exit status of orphans, which process 1 of a container inherits as children."""
    with suppress(ChildProcessError):
        any_ended = os.WEXITED | os.WNOHANG | os.WNOWAIT  # WNOWAIT: Popen takes the status of our own children
        while (found := os.waitid(os.P_ALL, 0, any_ended)) and found.si_pid not in ours:
            os.waitpid(found.si_pid, 0)
