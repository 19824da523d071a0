"""A PostgreSQL of our own, for trying out and for tests: found, made, started as our child, stopped.

Everything it needs and makes lies in one folder: `data/` (the cluster), `run/` (the socket), `log/` and
`postgres.log` (what it says), `lock` (held by the owner), `wheel-<version>/` (binaries that another user can
reach). Nothing of it is for production: it trusts whoever may enter `run/`, which is one user and root.

May import nothing of the package; is imported by `up`, the command line and the tests. Its modules, each of which
imports only those below it:

    cluster       from a folder to a server that accepts connections
    postmaster    the process that serves a cluster, and its end
    binaries      PostgreSQL's programs, found and made reachable
    account       whom the server runs as, and that its folders are theirs
    owner         `take_lock`, `release`, `dies_with_us`: what ends with the program that owns it
    errors        EmbeddedError
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from dataloader.embedded import cluster, postmaster
from dataloader.embedded.errors import EmbeddedError
from dataloader.embedded.owner import dies_with_us, release, take_lock

__all__ = ["EmbeddedError", "Server", "dies_with_us", "release", "running", "take_lock"]


@dataclass(eq=False)
class Server:
    """A running PostgreSQL that is our child; as a context manager it stops at the end of the block.

    On Linux it also stops when the thread that started it ends, however that happens.
    """

    root: Path
    dsn: str
    process: subprocess.Popen[bytes]
    lock: IO[str]

    @classmethod
    def start(
        cls,
        root: Path,
        settings: Mapping[str, str] | None = None,
        pg_bin: Path | None = None,
        initdb: Sequence[str] = (),
        user: str = "dataloader",
    ) -> Self:
        """Start the server that lives in `root`, making the folder and the cluster if they are missing.

        `settings` are PostgreSQL's own and win over ours, `initdb` further options for making the cluster.
        As root the server runs as `user`, who is made if missing (else as nobody). A server whose owner
        was killed is ended first. Call it from the main thread. Returns when the server accepts
        connections; raises EmbeddedError, and then nothing is left running.
        """
        root = Path(root).resolve()
        try:
            lock = take_lock(root / "lock")
            try:
                process = cluster.start(root, settings or {}, pg_bin, initdb, user)
            except BaseException:
                release(lock)
                raise
        except (OSError, subprocess.SubprocessError) as error:  # the latter of an initdb that hangs
            raise EmbeddedError(f"cannot use {root} for PostgreSQL: {error}") from error
        return cls(root, _dsn(root, cluster.socket_folder(root)), process, lock)

    def stop(self) -> None:
        """Stop the server: sessions are ended, all that was committed is kept. Harmless when repeated."""
        if self.lock.closed:
            return  # the folder may have another owner by now
        postmaster.stop(self.process)
        cluster.remove_far_socket_folder(self.root)
        release(self.lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def running(root: Path) -> str | None:
    """The DSN of the server in `root` if one is up and this user may reach it; nothing is changed."""
    root = Path(root).resolve()
    run = postmaster.listens_in(root / "data")
    return _dsn(root, run) if run else None


def _dsn(root: Path, run: Path) -> str:
    return f"host={run} user={cluster.user_of(root)} dbname=postgres"
