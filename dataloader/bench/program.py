"""The command `bench`: it measures figures, and prints and stores the results."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import dataloader
from dataloader import embedded, log
from dataloader.bench import (
    affinity,
    claim,
    cpu,
    drain,
    enqueue,
    fair,
    handover,
    idle,
    keys,
    latency,
    logs,
    memory,
    ordered,
    pgbench,
    report,
)
from dataloader.bench.line import Line
from dataloader.bench.place import BenchError, Place, Wish, machine
from dataloader.config import Settings
from dataloader.farm.process import EXIT_FAILED, EXIT_OK
from dataloader.queue import db, migrations

Measure = Callable[[Place], Iterator[Line]]
FIGURES: dict[str, Measure] = {
    "drain": drain.measure,
    "keys": keys.measure,
    "ordered": ordered.measure,
    "fair": fair.measure,
    "claim": claim.measure,
    "affinity": affinity.measure,
    "latency": latency.measure,
    "handover": handover.measure,
    "cpu": cpu.measure,
    "enqueue": enqueue.measure,
    "idle": idle.measure,
    "memory": memory.measure,
    "logs": logs.measure,
}
INTERRUPTED = 130
FILE_WIDTH = 160  # characters; the width of a table that does not go to a terminal


def run(settings: Settings, figures: Sequence[str], wish: Wish, json_path: str | None) -> int:
    """Measure these figures, all if none is named, and print them; the exit code.

    The bench runs in the settings' database, or without one in an embedded PostgreSQL in DL_HOME. `json_path` is a
    file, or `-` for stdout. The bench removes all that it made, also after Ctrl-C and SIGTERM, and then prints the
    figures measured so far.
    """
    out, err = console(to_stderr=False), console(to_stderr=True)
    lines, about = list[Line](), dict[str, Any]()
    status = _measure(settings, figures or list(FIGURES), wish, err, lines, about)
    if lines:
        (err if json_path == "-" else out).print(report.table(lines, report.conditions(about)))
    if lines and json_path:
        document = report.document(lines, about)
        _ = out.file.write(document) if json_path == "-" else Path(json_path).write_text(document, "utf-8")
    return status


def _measure(
    settings: Settings, figures: Sequence[str], wish: Wish, err: Console, lines: list[Line], about: dict[str, Any]
) -> int:
    """Add the measured lines to `lines` and the machine's facts to `about`, up to a failure; the exit code."""

    def each() -> None:
        with placed(settings, wish, err) as place:
            about.update(_about(place))
            for name in figures:
                for line in FIGURES[name](place):
                    lines.append(line)
                    place.progress.console.print(f"{line.figure}: {line.name}", style="dim", highlight=False)

    return attempted("bench", err, each)


def attempted(command: str, err: Console, action: Callable[[], None]) -> int:
    """The exit code of a command that measures: what it cannot do is said in a line, and SIGTERM ends it as Ctrl-C."""
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        action()
        return EXIT_OK
    except KeyboardInterrupt:
        err.print(f"dataloader {command}: interrupted", style="red")
        return INTERRUPTED
    except (BenchError, embedded.EmbeddedError, migrations.SchemaError, db.Error, OSError) as error:
        message = log.masked(str(error).strip())
        err.print(f"dataloader {command}: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
        return EXIT_FAILED


def console(to_stderr: bool) -> Console:
    """Of the terminal's width, or FILE_WIDTH."""
    made = Console(stderr=to_stderr)
    if not made.is_terminal:
        made.width = FILE_WIDTH
    return made


@contextmanager
def placed(settings: Settings, wish: Wish, console: Console) -> Iterator[Place]:
    """The database, a folder and progress bars; the end of the block removes schemas, folder and server."""
    with ExitStack() as cleanup:
        folder = settings.dl_home / f"bench-{time.time_ns()}"
        folder.mkdir(parents=True)
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        where = settings.queue_dsn
        if where is None:
            server = embedded.Server.start(folder / "postgres", pg_bin=settings.dl_pg_bin)
            where = cleanup.enter_context(server).dsn
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = Progress(*columns, console=console, transient=True)
        place = Place(where, folder, wish, pgbench.find(settings.dl_pg_bin), progress)
        cleanup.callback(place.drop)
        cleanup.enter_context(progress)
        yield place


def _about(place: Place) -> dict[str, Any]:
    with place.connect("public") as conn:
        facts = machine(conn)
    return {
        "dataloader": dataloader.version(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rounds": place.wish.rounds,
        "scale": place.wish.scale,
        "prefetch": place.wish.prefetch,
        "bare_tables": place.wish.bare,
        "pgbench": str(place.pgbench) if place.pgbench else None,
        "machine": facts,
    }


def _interrupted(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
