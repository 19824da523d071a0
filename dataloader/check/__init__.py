"""`dataloader check` finds reasons why a farm would not work; it starts nothing and changes nothing.

This module checks settings, folders and pipelines; `database` checks the databases.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from pydantic_core import to_jsonable_python

from dataloader import config, log, pipelines, surroundings
from dataloader.check import database
from dataloader.check.database import Finding, Level, error, ok, warning
from dataloader.config import Settings
from dataloader.exits import EXIT_FAILED, outcome
from dataloader.farm.failures import is_users
from dataloader.farm.slots import files_needed
from dataloader.local import ports
from dataloader.log import masking
from dataloader.pipelines import hooks
from dataloader.queue import db

TASKS = "known tasks: "
CORRECT = "correct the module: no worker starts without it"
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Report:
    """The settings in effect, with secrets masked, and all findings."""

    settings: Mapping[str, str]
    findings: list[Finding]
    files: Sequence[str] = ()  # of the users' modules that were imported

    @property
    def is_good(self) -> bool:
        return all(finding.level is not Level.ERROR for finding in self.findings)

    def text(self) -> str:
        """The report for people: a line for each setting and each finding."""
        lines = [f"{name:26}{value}".rstrip() for name, value in self.settings.items()]
        lines += [""] if lines else []
        for finding in self.findings:
            lines.append(f"{finding.level:9}{finding.about:13}{finding.what}")
            lines += [f"{'':22}-> {finding.advice}"] if finding.advice else []
        return "\n".join(lines)

    def document(self) -> str:
        report = {"ok": self.is_good, "settings": self.settings, "findings": [f._asdict() for f in self.findings]}
        report["files"] = list(self.files)
        return json.dumps(report, ensure_ascii=False, indent=2)


def run(find_dsn: Callable[[Settings], str | None]) -> Report:
    """Check everything; `find_dsn` returns the DSN of the queue's database, or None."""
    try:
        settings, misspelt = config.load(), config.misspelt()
    except config.ConfigError as e:
        return Report({}, [error("settings", line) for line in str(e).splitlines()])
    before = [*settings_findings(settings, misspelt), *host_findings(settings)]
    reader, writer = _FORK.Pipe(duplex=False)

    def rest() -> None:
        findings = [*before, *pipeline_findings(settings, writer.send)]
        findings += database.database_findings(settings, find_dsn(settings))
        writer.send(Report(shown(settings), findings, users_files()))

    child = _FORK.Process(target=rest)  # a module may end the process that imports it
    child.start()
    writer.close()
    last: str | Report = ""  # the module that the child imports, then its report
    with suppress(EOFError):
        while isinstance(last, str):
            last = reader.recv()
    if isinstance(last, Report):
        child.kill()  # a module may have left threads that go on
    child.join()
    if isinstance(last, Report):
        return last
    if not last:
        sys.exit(EXIT_FAILED)  # an error of our own, which the child has printed
    text = f"{last} {outcome(child.exitcode or 0)}; what follows it is not checked"
    return Report(shown(settings), [*before, error("pipelines", text, CORRECT)])


def shown(settings: Settings) -> dict[str, str]:
    """Every variable with the value in effect; a secret is masked, a DSN has no password."""
    effective = {"workers_json": settings.workers, "dl_data_dir": settings.data_dir}
    values = dict(settings) | effective
    return {name.upper(): _shown(name, value) for name, value in values.items()}


def _shown(name: str, value: Any) -> str:
    if isinstance(value, SecretStr):
        return db.shown(value.get_secret_value()) if name.endswith("_dsn") else log.MASK
    if isinstance(value, tuple) and all(isinstance(each, str) for each in value):
        return ",".join(map(log.masked, value))
    if isinstance(value, (tuple, dict)):
        return json.dumps(log.masked(to_jsonable_python(value, exclude_none=True)), ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else log.masked(str(value))


def settings_findings(settings: Settings, misspelt: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Findings on valid values that are doubtful: without effect, or a secret that is too short."""
    given = len(settings.model_fields_set)
    yield ok("settings", f"{given} given, {len(Settings.model_fields) - given} as by default")
    for name, meant in misspelt:
        yield warning("settings", f"{name} is no setting", f"{meant} may be meant")
    unused = {"pg_user", "pg_password", "pg_port"} & settings.model_fields_set
    if unused and not (settings.pg_host or settings.pg_database):
        names = ", ".join(sorted(unused)).upper()
        yield warning("settings", f"without effect: {names}", "set PG_HOST and PG_DATABASE too")
    if short := ", ".join(masking.too_short(settings)).upper():
        what = f"{short}: a secret of less than {masking.SHORTEST} characters is not masked by its value"
        yield warning("settings", what, "take a longer one; a short one is masked in URLs and by its name only")


def host_findings(settings: Settings) -> Iterator[Finding]:
    """The findings on this host: limits, /proc, folders, the API's address."""
    files = files_needed(sum(spec.concurrency for spec in settings.workers))
    for lack in (*surroundings.worker_lacks(files), *surroundings.api_lacks()):
        yield error("host", *lack)
    if trouble := ports.trouble(settings.app_host, settings.app_port):
        yield error("host", trouble, "correct APP_HOST or APP_PORT")
    yield data_folder(settings.data_dir, given=settings.dl_data_dir is not None)
    for name in ("log_path", "metric_path", "audit_log_path"):
        if folder := getattr(settings, name):
            yield written_folder(name.upper(), folder)


def data_folder(folder: Path, given: bool) -> Finding:
    """The finding on the folder of file loaders; its lack is an error only if a setting names it (`given`)."""
    if os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK):
        return ok("data", f"{folder} can be read")
    level = Level.ERROR if given else Level.WARNING
    state = "cannot be read" if os.path.isdir(folder) else "is no folder" if os.path.exists(folder) else "is missing"
    return Finding(level, "data", f"DL_DATA_DIR: {folder} {state}", "make it, readable for this user, for file loaders")


def written_folder(name: str, folder: Path) -> Finding:
    """The finding on a folder of log files: this user can write to it, or can make it, and can lock its files."""
    existing = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        advice = "make it, writable for this user, on a file system whose files can be locked (flock)"
        return error("logs", f"{name}: {folder} cannot be written to: {e.strerror}", advice)
    return ok("logs", f"{name}: {folder} can be written to")


def pipeline_findings(settings: Settings, begins: Callable[[str], None]) -> list[Finding]:
    """Import the modules that the workers import; findings on failures, and one with all known tasks.

    `begins` is called with the subject of a sentence before each import, and with "" behind the last one.
    """
    wanted = [("built in", f"{pipelines.__name__}.{name}") for name in pipelines.BUILT_IN]
    wanted += [("DL_HOOKS", name) for name in settings.dl_hooks]
    wanted += [("DL_PRELOAD", name) for name in settings.dl_preload]
    wanted += [("DL_PIPELINES", name) for name in settings.dl_pipelines]
    findings: list[Finding] = []
    for variable, name in wanted:
        begins(f"{variable}: the process that imports {name}")
        findings += filter(None, [_imported(variable, name)])
    begins("")
    return [*findings, ok("pipelines", TASKS + ", ".join(pipelines.tasks()))]


def users_files() -> list[str]:
    """The files of the imported modules that are neither Python's nor of an installed package nor of this one."""
    named = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted(os.path.abspath(name) for name in named if name and name.endswith(".py") and is_users(name))


def _imported(variable: str, module: str) -> Finding | None:
    is_new, before = module not in sys.modules, _registered()
    try:
        with redirect_stdout(sys.stderr):  # stdout holds only the report
            pipelines.import_users(module)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        advice = CORRECT
        if isinstance(e, ModuleNotFoundError) and e.name and f"{module}.".startswith(f"{e.name}."):
            advice = "correct the name, or start in the folder that holds it, or put that folder on PYTHONPATH"
        return error("pipelines", f"{variable}: {module} cannot be imported: {_line(e)}", advice)
    after = _registered()
    if variable != "DL_HOOKS" and after["around_enqueue"] > before["around_enqueue"]:
        text = f"{variable}: {module} registers @around_enqueue, which no API process would call"
        return warning("pipelines", text, "name the module of this function in DL_HOOKS too")
    if variable == "DL_PIPELINES" and is_new and after == before:
        return warning("pipelines", f"{variable}: {module} registers no task", "use @register(...) in it")
    return None


def _registered() -> dict[str, int]:
    return {hook.name: len(hook) for hook in hooks.ALL} | {"task": len(pipelines.tasks())}


def _line(trouble: BaseException) -> str:
    """The error in one line, with its place in the user's code."""
    line = log.masked(traceback.format_exception_only(trouble)[-1].strip())
    place = traceback.extract_tb(trouble.__traceback__)[-1]
    outside = place.filename.startswith("<frozen") or isinstance(trouble, SyntaxError)
    return line if outside else f"{line} ({place.filename}, line {place.lineno})"
