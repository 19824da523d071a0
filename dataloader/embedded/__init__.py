"""An embedded PostgreSQL, for first tries and for tests: a server that runs as our child.

Its files lie in one folder: `data/` (the cluster), `run/` (the socket), `log/` and `postgres.log` (its log), `lock`
(held by the owner), `wheel-<version>/` (binaries for another user). It is not for production: the server trusts
every user that may enter `run/`, which is one user and root.

The modules; each imports only those below it:

    cluster       from a folder to a server that accepts connections
    postmaster    the process that serves a cluster, and its end
    binaries      PostgreSQL's programs, found and made reachable
    account       the user of the server and of its folders
    owner         `take_lock`, `release`, `dies_with_us`: locks and children that end with their owner; EmbeddedError
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from dataloader.embedded import cluster, postmaster
from dataloader.embedded.owner import EmbeddedError, dies_with_us, release, take_lock

__all__ = ["EmbeddedError", "Server", "dies_with_us", "release", "running", "take_lock"]


@dataclass(eq=False)
class Server:
    """A running PostgreSQL, our child; as a context manager it stops at the end of the block.

    On Linux the server also stops when the thread that started it ends for any reason.
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
        """Start the server in `root`; the call makes a missing folder and a missing cluster.

        `settings` are PostgreSQL's parameters and win over ours; `initdb` are further options of initdb. For root the
        server runs as `user`, which is made if missing, or else as nobody. The call first ends a server left by a
        killed owner. Call it from the main thread. It returns when the server accepts connections. It raises
        EmbeddedError, and then leaves no process running.
        """
        root = Path(root).resolve()
        try:
            lock = take_lock(root / "lock")
            try:
                process = cluster.start(root, settings or {}, pg_bin, initdb, user)
            except BaseException:
                release(lock)
                raise
        except (OSError, subprocess.SubprocessError) as error:  # SubprocessError: initdb hangs
            raise EmbeddedError(f"cannot use {root} for PostgreSQL: {error}") from error
        return cls(root, _dsn(root, cluster.socket_folder(root)), process, lock)

    def stop(self) -> None:
        """Stop the server, which ends its sessions and keeps every commit. A second call does nothing."""
        if self.lock.closed:
            return  # the folder may have another owner by now
        postmaster.stop(self.process)
        cluster.remove_far_socket_folder(self.root)
        release(self.lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def running(root: Path) -> str | None:
    """The DSN of the server in `root`, if it runs and this user may reach it; the call changes nothing."""
    root = Path(root).resolve()
    run = postmaster.listens_in(root / "data")
    return _dsn(root, run) if run else None


def _dsn(root: Path, run: Path) -> str:
    return f"host={run} user={cluster.user_of(root)} dbname=postgres"
