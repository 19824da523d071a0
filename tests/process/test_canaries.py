"""Canaries in every place for a secret, then a look at whatever leaves the farm: none of them may be there."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

import psutil
import psycopg
import pytest
from farming import Farm, answers, until
from psycopg.conninfo import make_conninfo

from dataloader.api.web import tokens

QUEUE = "canaries"
SHOWN = 16  # characters of a secret that nobody may see in a row


# Each argument is a command; for one that cannot be understood click exits with 2.
TYPED = """
import sys
from dataloader.cli.main import main
for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit as ended:
        assert ended.code != 2, command
"""


class Canaries:
    """Secrets that occur nowhere else, by the place that they were put into."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def put(self, place: str) -> str:
        """A secret for this place."""
        return self.known.setdefault(place, f"canary{uuid4().hex[:20]}")

    def token(self, place: str) -> str:
        return self.known.setdefault(place, tokens.new())

    def seen(self, text: str) -> list[str]:
        """The places whose secrets are in this text, if only half."""
        return [place for place, secret in self.known.items() if secret[:SHOWN] in text or secret[-SHOWN:] in text]


def args_of(canaries: Canaries, end: str) -> dict[str, Any]:
    """Args with a secret in every place for one."""
    put = canaries.put
    secret = {
        "password": put("password"),
        "token": put("token"),
        "api_key": put("api_key"),
        "authorization": f"Bearer {put('bearer')}",
        "headers": {"X-Api-Key": put("header"), "Cookie": f"sid={put('cookie')}"},
        "dsn": f"postgresql://u:{put('dsn')}@h/db",
        "conninfo": f"host=h user=u password={put('conninfo')}",
        "list": [{"secret": put("in a list")}, [{"deep": {"client_secret": put("deep")}}]],
        "tokens": [put("under a name 1"), {"a": put("under a name 2")}],
        "source": f"https://u:{put('userinfo')}@h/file?access_token={put('query')}",
        "connection_string": f"Server=h;Password={put('connection string')}",
        "auth": ["u", put("auth")],
    }
    text = (
        f"curl -H 'Authorization: Bearer {put('curl')}' https://{put('userinfo alone')}@h, the {canaries.token('text')}"
        f", sent as bearer {put('sent')}2, ALTER ROLE u PASSWORD '{put('sql')}'"
    )
    return secret | {"text": text, "end": end, "lock_key": "shown"}


class Watched:
    """A farm that was given canaries, and all that has left it."""

    def __init__(self, farm: Farm, port: int) -> None:
        self.farm, self.port, self.canaries = farm, port, Canaries()
        self.folder = farm.folder / "logs"
        self.left: list[tuple[str, str]] = []  # from where, what
        self.token, self.cookie = self.canaries.token("token of the API"), self.canaries.token("cookie")
        self.env = self._settings()
        self.programs = [farm.start(name, **self.env) for name in ("workers", "reaper", "api")]

    def _settings(self) -> dict[str, str]:
        put = self.canaries.put
        entries = [
            tokens.entry(token, f"token-{number}", ["read", "trigger", "operate"])
            for number, token in enumerate((self.token, self.cookie))
        ]
        return {
            **{name: make_conninfo(self.farm.dsn, password=put(name)) for name in ("DL_DB_DSN", "DL_TARGET_DSN")},
            "PG_PASSWORD": put("PG_PASSWORD"),
            "DL_API_TOKENS": f"[{', '.join(entries)}]",
            "DL_TOKEN": self.token,
            "DL_URL": f"http://127.0.0.1:{self.port}",
            "APP_PORT": str(self.port),
            "DL_PIPELINES": "farm_pipelines,canary_pipelines",
            "WORKERS_JSON": json.dumps([{"queue": QUEUE, "concurrency": 2}]),
            "GUNICORN_CMD_ARGS": "--access-logfile - --log-level debug",
            "DEBUG": "1",
            **{name: str(self.folder) for name in ("LOG_PATH", "METRIC_PATH", "AUDIT_LOG_PATH")},
        }

    def job(self, end: str, **more: Any) -> UUID:
        """A job that is told everything, and ends so."""
        given = {"queue_name": QUEUE, "args": args_of(self.canaries, end), "max_attempts": 1}
        return self.farm.enqueue("tells_all", **given | more)

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> str:
        """Send a request and note its answer, head and all."""
        sent = {"Authorization": f"Bearer {self.token}"} | {name.replace("_", "-"): v for name, v in headers.items()}
        sent = {name: value for name, value in sent.items() if value}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, sent, method=method)
        try:
            with urllib.request.build_opener(_Stays).open(request, timeout=60) as answer:
                text = f"{answer.status}\n{answer.headers}\n{answer.read().decode()}"
        except urllib.error.HTTPError as e:
            with e:
                text = f"{e.code}\n{e.headers}\n{e.read().decode()}"
        self.left.append((f"{method} {path}", text))
        return text

    def page(self, path: str) -> str:
        return self.ask(path, Authorization="", Cookie=f"dl_token={self.cookie}", Accept="text/html")

    def run(self, commands: list[str]) -> None:
        env = os.environ | self.env | {"DL_HOME": str(self.farm.folder), "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(
            [sys.executable, "-c", TYPED, *commands],
            env=env, capture_output=True, text=True, cwd=self.farm.folder, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        self.left += [("the command line", done.stdout), ("the command line's stderr", done.stderr)]

    def look_at_processes(self) -> None:
        """Look at their titles and sessions."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                self.left.append((f"title of {process.pid}", f"{process.name()} {process.cmdline()}"))
        ours = "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'dl-%%'"
        sessions = self.farm.rows(f"SELECT application_name || ' ' || query {ours}")
        assert sessions
        self.left += [("pg_stat_activity", text) for (text,) in sessions]

    def look_at_what_stays(self, foreign: UUID) -> None:
        """Look at the files, and at all but args, progress and the rows that another service has written."""
        files = [path for path in self.farm.folder.rglob("*") if path.is_file()]
        self.left += [(path.name, path.read_text(errors="replace")) for path in files]
        of_jobs = (
            "(SELECT job_id, kind, payload - 'progress' FROM dl_job_events)",
            "(SELECT job_id, to_jsonb(j) - '{args,progress}'::text[] FROM dl_jobs j)",
        )
        for table in of_jobs:
            rows = self.farm.rows(f"SELECT x::text FROM {table} x WHERE job_id <> %s", foreign)
            self.left += [(table, row[0]) for row in rows]
        for table in ("dl_workers", "dl_queues", "dl_totals", "dl_pace", "dl_job_logs", "dl_spans", "dl_tasks"):
            self.left += [(table, row[0]) for row in self.farm.rows(f"SELECT x::text FROM {table} x")]


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """An answer that leads elsewhere is looked at like any other."""


def foreign(watched: Watched) -> UUID:
    """A job that a service without our masking has run: its row and journal hold what it liked to write."""
    put, text = watched.canaries.put, "x" * 270
    error = f"{text} postgresql://u:{put('foreign, at the cut')}@h/db password={put('foreign')}"
    job = watched.job("none", queue_name="foreign")
    progress = json.dumps({"password": put("foreign progress"), "note": f"at https://u:{put('foreign url')}@h"})
    watched.farm.conn.execute(
        "UPDATE dl_jobs SET status = 'failed', finished_at = now(), error = %s, progress = %s::jsonb WHERE job_id = %s",
        (error, progress, job),
    )
    payload = json.dumps({"api_key": put("foreign event"), "error": f"token={put('foreign event text')}"})
    watched.farm.conn.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind, payload) VALUES (%s, 'foreign', 'note', %s)", (job, payload)
    )
    return job


def everything_is_read(watched: Watched, jobs: dict[str, UUID]) -> None:
    """All that people and programs can ask for."""
    of_farm = ["/stats", "/workers", "/pace?minutes=10", "/events?limit=200", "/database"]
    of_farm += ["/queues", "/errors", "/tasks"]
    searched = ("/suggestions?q=canary", "/suggestions?q=key:", "/tally?q=canary", "/tasks/tells_all")
    of_jobs = [f"/jobs?{filters}" for filters in ("limit=200", f"queue={QUEUE}", "status=dead", "sort=key")]
    for path in (*of_farm, *searched, *of_jobs):
        assert watched.ask("/api/v1" + path).startswith("200"), path
    for path in ("/health", "/info", "/status", "/ready", "/metrics", "/openapi.json", "/docs"):
        assert watched.ask(path).startswith("200"), path
    pages = ["/", "/jobs", "/workers", f"/queues/{QUEUE}", "/queues/foreign", "/jobs?status=dead", "/jobs?q=canary"]
    pages += ["/errors", "/tasks", "/tasks/tells_all", "/timeline", "/activity", "/postgres"]
    pages += ["/search/suggestions?q=canary", "/trigger?task=tells_all", f"/jobs/{jobs['fail']}/again"]
    for path in pages:
        assert watched.page(path).startswith("200"), path
    for job in jobs.values():
        for path in ("", "/status", "/events", "/logs", "/result"):
            assert watched.ask(f"/api/v1/jobs/{job}{path}").startswith("200")
        assert watched.page(f"/jobs/{job}").startswith("200")


def everything_is_asked_wrongly(watched: Watched, job: UUID) -> None:
    """Requests that are refused, each with a secret in it."""
    put, token = watched.canaries.put, watched.canaries.token
    trigger = "/api/v1/jobs/trigger"
    kind = {"Content_Type": "application/json"}
    watched.ask(trigger, "POST", f'{{"password": "{put("malformed")}"'.encode(), **kind)
    watched.ask(
        trigger, "POST", json.dumps({"args": {"token": put("unfit")}, "priority": put("unfit")}).encode(), **kind
    )
    fields = {"queue": QUEUE, "task": "noop", "lock_key": "k", "args": {"password": put("refused")}, "priority": "x"}
    watched.ask(trigger, "POST", json.dumps(fields | {"password": put("unknown field")}).encode(), **kind)
    watched.ask(trigger, "POST", b"x", Content_Type="text/plain; password=" + put("content type"))
    for header in (
        f"Bearer {token('wrong token')}",
        f"Basic {put('basic')}",
        token("bare token"),
        f"bearer  {put('odd')}",
    ):
        assert watched.ask("/api/v1/stats", Authorization=header).startswith("401")
    watched.ask("/api/v1/stats", Authorization="", Cookie=f"dl_token={token('wrong cookie')}")
    watched.ask("/login", "POST", f"token={token('wrong sign-in')}".encode())
    in_query = token("token in the query")
    for path in ("/api/v1/stats", "/api/v1/jobs", "/health", "/nothing", "/", "/jobs", "/login"):
        for call in (watched.ask, watched.page):
            call(f"{path}?token={in_query}")
    for name in ("limit", "since", "status", "after", "password"):
        watched.ask(f"/api/v1/jobs?{name}={token('a bad parameter')}")
        watched.page(f"/jobs?{name}={token('a bad parameter')}")
    watched.ask("/jobs?token=" + in_query, Authorization="", Accept="text/html")  # led to the sign-in
    watched.ask("/login?next=" + quote(f"/jobs?token={in_query}", safe=""), Authorization="")
    for path in (f"/api/v1/jobs/{token('in a path')}", f"/{token('in a path')}", f"/jobs/{token('in a path')}"):
        watched.ask(path)
        watched.page(path)
    watched.ask(f"/api/v1/jobs/{job}/status?wait={token('a bad wait')}", If_None_Match=f'"{token("an etag")}"')
    watched.ask(
        "/health", X_Request_ID=token("a request id"), User_Agent=token("agent"), Referer=f"http://h/?token={in_query}"
    )
    watched.ask("/health", X_Forwarded_For=token("forwarded"))
    watched.ask(f"/api/v1/jobs/{job}/cancel", "POST", f'{{"force": "{token("a bad flag")}"}}'.encode(), **kind)


def commands(jobs: dict[str, UUID]) -> Iterator[str]:
    for way in ("", " --direct"):
        yield "jobs --json" + way
        for which in ("fail", "foreign"):
            yield f"job {jobs[which]}{way}"
            yield f"doctor {jobs[which]}{way}"
    yield f"job {jobs['spin']} --json --direct"
    for which in ("fail", "die"):
        yield f"logs {jobs[which]}"
    yield "errors"
    yield f"events {jobs['fail']}"
    yield "events --json --direct"
    yield "top --once --direct"
    yield "dsn"
    yield "check"


@pytest.mark.long
def test_j4_no_canary_leaves(farm: Farm, free_port: int) -> None:
    watched = Watched(farm, free_port)
    ends = ("succeed", "fail", "die", "exit", "refuse")
    jobs = {end: watched.job(end) for end in ends} | {"spin": watched.job("spin", priority=9)}
    jobs["later"] = watched.job("none", available_at=datetime.now(UTC) + timedelta(hours=1))
    jobs["foreign"] = foreign(watched)
    until(lambda: answers(free_port, "/ready"), "the API")
    fields = {"queue": QUEUE, "task": "tells_all", "lock_key": "http", "max_attempts": 1}
    fields["args"] = args_of(watched.canaries, "fail")
    answer = watched.ask("/api/v1/jobs/trigger", "POST", json.dumps(fields).encode(), Content_Type="application/json")
    jobs["triggered"] = UUID(json.loads(answer.strip().rpartition("\n")[2])["job_id"])
    for name in (*ends, "triggered"):
        farm.wait(jobs[name], "succeeded", "failed", "lost")
    farm.begun(jobs["spin"])
    watched.look_at_processes()
    with psycopg.connect(farm.dsn) as slow:
        slow.execute(f"SELECT 1 /* ALTER ROLE u PASSWORD '{watched.canaries.put('a statement')}' */")
        watched.run(list(commands(jobs)))
        everything_is_read(watched, jobs)
    everything_is_asked_wrongly(watched, jobs["spin"])
    watched.programs[0].signal(signal.SIGTTIN)
    log = watched.folder / "dataloader.log"
    until(lambda: "supervisor.worker.stacks" in log.read_text(), "the workers' stacks")
    cancel = f"/api/v1/jobs/{jobs['spin']}/cancel"
    assert watched.ask(cancel, "POST", b"{}", Content_Type="application/json").startswith("200")
    farm.wait(jobs["spin"], "canceled")
    everything_is_read(watched, jobs)
    assert [program.stop() for program in watched.programs] == [0, 0, 0]
    watched.look_at_what_stays(jobs["foreign"])
    leaks = {(place, where) for where, text in watched.left for place in watched.canaries.seen(text)}
    assert sorted(leaks) == []
    assert len(watched.left) > 150
    returned = next(text for where, text in watched.left if where == f"GET /api/v1/jobs/{jobs['succeed']}/result")
    assert '"note":"*** ***' in returned
    assert "***" in farm.job(jobs["fail"])["error"]
    assert "could not load" in farm.job(jobs["fail"])["error"]
    for job, written in ((jobs["fail"], "printed: {"), (jobs["die"], "a program says")):
        (lines,) = farm.rows("SELECT string_agg(text, ' ') FROM dl_job_logs WHERE job_id = %s", job)
        assert written in lines[0]
        assert "***" in lines[0]
