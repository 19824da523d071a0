"""A link between clients and PostgreSQL that is cut at chosen statements, and is away for a time.

The link understands so much of the protocol that it knows the name of each session and the text of each statement. A
cut is exact: the server never sees the statement, or it has executed it and the client never hears of that.

A thread serves the link; its methods are for other threads.
"""

import asyncio
import re
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from psycopg.conninfo import conninfo_to_dict, make_conninfo

SOCKET = ".s.PGSQL.5432"
BEFORE, AFTER = "before", "after"  # the server sees the statement; the server has answered it
REFUSES, SILENT = "refuses", "silent"  # how the server is away: as one that is down, as a host that is lost
PROTOCOL_3, CANCEL, SSL, GSS = 196608, 80877102, 80877103, 80877104
EXECUTED_SEC = 5.0  # for a statement that is cut after it: it may wait for a lock
Side = Literal["before", "after"]
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A place to cut: before or after this statement of a session whose name begins with `role`."""

    role: str
    statement: str
    side: Side

    def __str__(self) -> str:
        return f"{self.role} {self.side} {self.statement[:100]}"


@dataclass(eq=False)
class _Session:
    """A client's connection and its own to the server."""

    name: str
    pid: int
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    is_frozen: bool = False  # neither side hears of the other
    cut_after: Cell | None = None  # the answer to the statement under way is dropped
    prepared: dict[bytes, bytes] = field(default_factory=dict)

    def close(self) -> None:
        for end in (self.client, self.server):
            end.transport.abort()


class Link:
    """A Unix socket in `folder` that leads to the server of `dsn`."""

    def __init__(self, folder: Path, dsn: str) -> None:
        folder.mkdir()
        self._path = folder / SOCKET
        given = conninfo_to_dict(dsn)
        host, port = str(given.get("host") or "/tmp"), int(given.get("port") or 5432)
        self._target: str | tuple[str, int] = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)
        self.dsn = make_conninfo(dsn, host=str(folder), port=5432)
        self.hit: list[Cell] = []  # where it was cut
        self._seen: Counter[tuple[str, str]] = Counter()
        self._cells: set[Cell] = set()
        self._sessions: set[_Session] = set()
        self._cut_off: set[int] = set()  # the processes that were cut before the others: for them it is away already
        self.passed = 0  # messages of clients, a statement or a piece of a COPY each
        self._act_at: tuple[int, Side, Callable[[int], object]] | None = None
        self._away: str | None = None
        self._back = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self._call(self._open())

    # --- for other threads ---

    def seen(self) -> Counter[tuple[str, str]]:
        """How often each statement of each role has passed since the last call of this method."""
        seen, self._seen = self._seen, Counter()
        return seen

    def arm(self, cells: Iterable[Cell]) -> None:
        """Cut each of these once, at the next session to come there; its process is away until the next `back`."""
        self._cells = set(cells)

    def act_at(self, number: int, side: Side, act: Callable[[int], object]) -> None:
        """Call `act`, in a thread, beside the message of this number from now on; it gets the process of the client.

        The message waits while `act` runs, or the answer to the message.
        """
        self._act_at = self.passed + number, side, act

    def disarmed(self) -> bool:
        """Call the `act` of `act_at` no more; True if it was not called yet."""
        was_armed, self._act_at = self._act_at is not None, None
        return was_armed

    def leave(self, how: str = REFUSES) -> None:
        """Be away from now on, and disarm. REFUSES: sessions end. SILENT: nothing is heard of the server."""

        async def leave() -> None:
            self._away, self._cells = how, set()
            self._back.clear()
            if how == REFUSES and self._listener:
                self._listener.close()
                self._path.unlink(missing_ok=True)
            for session in list(self._sessions):
                session.is_frozen, session.cut_after = how == SILENT, None
                if how == REFUSES:
                    session.close()

        self._call(leave())

    def back(self) -> None:
        """Be there again. The sessions of before are over, as after a restart of the server."""

        async def back() -> None:
            was, self._away = self._away, None
            self._cut_off.clear()
            for session in list(self._sessions):
                session.close()
            if was == REFUSES:
                await self._open()
            self._back.set()

        self._call(back())

    def thaw(self) -> None:
        """Be there again after a silence. The sessions of before go on where they were."""

        async def thaw() -> None:
            self._away = None
            for session in self._sessions:
                session.is_frozen = False
            self._back.set()

        self._call(thaw())

    def away(self, seconds: float, how: str = REFUSES, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Be away for so long; `meanwhile` is called in the middle of it."""
        begun = time.monotonic()
        self.leave(how)
        time.sleep(seconds / 2)  # the length of the outage, not a wait for anything
        meanwhile()
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        self.back()

    def close(self) -> None:
        """End all sessions, and accept no more."""

        async def close() -> None:
            if self._listener:
                self._listener.close()
            await asyncio.sleep(0.05)  # what has just been accepted has its task then
            tasks = list(self._tasks)
            for session in list(self._sessions):
                session.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.05)  # a transport closes in a later turn of the loop

        self._call(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    # --- in the link's thread ---

    async def _open(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listener = await asyncio.start_unix_server(self._accept, self._path, backlog=256)

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, client)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # its end, or the link's
        finally:
            self._tasks.discard(task)
            client.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        pid = _peer(client)
        if pid in self._cut_off:
            return
        if self._away:
            await self._back.wait()
        startup, code = await _startup(reader, client)
        if isinstance(self._target, str):
            from_server, server = await asyncio.open_unix_connection(self._target)
        else:
            from_server, server = await asyncio.open_connection(*self._target)
        server.write(startup)
        words = startup[8:].split(b"\0")
        parameters = dict(zip(words[::2], words[1::2], strict=False))
        name = parameters.get(b"application_name", b"").decode() if code == PROTOCOL_3 else ""
        session = _Session(name, pid, client, server)
        self._sessions.add(session)
        answers = asyncio.create_task(self._answers(session, from_server))
        self._tasks.add(answers)
        answers.add_done_callback(self._tasks.discard)
        try:
            if code == CANCEL:
                await reader.read()
            else:
                await self._questions(session, reader)
        finally:
            await self._over(session)

    async def _over(self, session: _Session) -> None:
        """One side has closed, or the link has cut them."""
        if session.is_frozen:
            await self._back.wait()  # the other side does not hear of it
        self._sessions.discard(session)
        session.close()

    async def _questions(self, session: _Session, reader: asyncio.StreamReader) -> None:
        """Forward the client's messages, statement by statement."""
        held, statement = b"", b""
        while True:
            head = await reader.readexactly(5)
            kind, size = head[:1], struct.unpack("!I", head[1:])[0]
            body = await reader.readexactly(size - 4)
            held += head + body
            if kind == b"Q":
                statement = body.rstrip(b"\0")
            elif kind == b"P":
                name, statement = body.split(b"\0", 2)[:2]
                session.prepared[name] = statement
            elif kind == b"B":
                statement = session.prepared.get(body.split(b"\0", 2)[1], b"")
            if kind in (b"P", b"B", b"D", b"E"):
                continue  # the rest of it follows
            if session.is_frozen:
                await self._back.wait()
            if kind in (b"Q", b"S") and statement and self._is_cut(session, statement.decode()):
                return
            self.passed += 1
            await self._act(session, BEFORE)
            session.server.write(held)
            held, statement = b"", b""
            await session.server.drain()
            await self._act(session, AFTER)
            if session.cut_after:
                await asyncio.sleep(EXECUTED_SEC)  # ended by the answer
                if session.cut_after:
                    self._cut(session, session.cut_after)
                    return

    async def _act(self, session: _Session, side: Side) -> None:
        if self._act_at and self._act_at[:2] == (self.passed, side):
            (_, _, act), self._act_at = self._act_at, None
            await asyncio.to_thread(act, session.pid)

    def _is_cut(self, session: _Session, text: str) -> bool:
        """Count a statement, and cut the session before it where it is time to; prepare a cut after it."""
        role, statement = session.name.partition(":")[0], " ".join(re.sub(r"\d+", "0", text).split())
        self._seen[role, statement] += 1
        if self._away:
            return False
        for cell in (Cell(role, statement, BEFORE), Cell(role, statement, AFTER)):
            if cell in self._cells:
                self._cells.discard(cell)
                if cell.side == BEFORE:
                    self._cut(session, cell)
                    return True
                session.cut_after = cell
                return False
        return False

    def _cut(self, session: _Session, cell: Cell) -> None:
        """End the session; for its process the server is away from now on."""
        session.cut_after = None
        self.hit.append(cell)
        self._cut_off.add(session.pid)
        for each in [each for each in self._sessions if each.pid == session.pid]:
            each.close()

    async def _answers(self, session: _Session, reader: asyncio.StreamReader) -> None:
        """Forward the server's messages; where a cut comes after the statement, wait for their end and cut."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(65_536):
                if session.is_frozen:
                    await self._back.wait()
                if cell := session.cut_after:
                    # ReadyForQuery, the end of an answer, is six bytes: Z, the length of 5, the transaction's status.
                    while data and not re.search(rb"Z\x00\x00\x00\x05[ITE]\Z", data):
                        data = (more := await reader.read(65_536)) and data[-5:] + more
                    if session.cut_after:  # else all sessions have been cut meanwhile
                        self._cut(session, cell)
                    break
                session.client.write(data)
                await session.client.drain()
        await self._over(session)


@contextmanager
def linked(dsn: str) -> Iterator[Link]:
    """A link in a folder of its own, as long as the block."""
    with tempfile.TemporaryDirectory(prefix="dl-link-") as folder:
        link = Link(Path(folder) / "link", dsn)
        try:
            yield link
        finally:
            link.close()


async def _startup(reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> tuple[bytes, int]:
    """The first packet of a session, and its code; encryption is declined."""
    while True:
        head = await reader.readexactly(8)
        size, code = struct.unpack("!II", head)
        packet = head + await reader.readexactly(size - 8)
        if code not in (SSL, GSS):
            return packet, code
        client.write(b"N")


def _peer(client: asyncio.StreamWriter) -> int:
    """The process at the other end."""
    found = client.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", found)[0]
    return pid
