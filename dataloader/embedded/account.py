"""The account that the server runs as, and the ownership of the server's folders.

PostgreSQL refuses to run as root, in a cluster of another user, and for a user without a name. So root runs the
server as an account of its own, made if missing, which must be able to enter all folders above the server's.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from dataloader.embedded.owner import EmbeddedError

TMP = Path("/tmp")  # noqa: S108  not TMPDIR: it may be long, and differs from shell to shell


@dataclass(frozen=True)
class Account:
    """The user that the server runs as; `switch` means that it is another than ours."""

    name: str
    uid: int
    gid: int
    switch: bool

    def popen(self) -> dict[str, Any]:
        """The arguments with which Popen becomes this user."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.switch else {}

    def barred_from(self, path: Path) -> Path | None:
        """The outermost folder of `path` and its parents that this user may not enter; None if there is none."""
        for folder in reversed([path, *path.parents]) if self.switch else ():
            status = folder.stat()  # the mode decides; access control lists are ignored
            mine = (status.st_uid == self.uid, stat.S_IXUSR), (status.st_gid == self.gid, stat.S_IXGRP)
            if not status.st_mode & next((bit for is_mine, bit in mine if is_mine), stat.S_IXOTH):
                return folder
        return None


def account_for(user: str) -> Account:
    """Our own user; for root the account `user`, which is made if missing, or else nobody."""
    switch = os.geteuid() == 0
    try:
        entry = _entry(user) or _added(user) or _entry("nobody") if switch else pwd.getpwuid(os.geteuid())
    except KeyError:
        raise EmbeddedError(
            f"user id {os.geteuid()} has no entry in /etc/passwd, and PostgreSQL does not start without one;"
            " run as a user that has a name, or as root"
        ) from None
    if entry is None:
        raise EmbeddedError(
            f"PostgreSQL refuses to run as root, and neither {user} nor nobody is a user here;"
            f" make one with: useradd --system {user}"
        )
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, switch)


def _entry(user: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        return None


def _added(user: str) -> pwd.struct_passwd | None:
    useradd = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin")
    if useradd:
        no_login = ["--system", "--no-create-home", "--shell", "/usr/sbin/nologin"]
        subprocess.run([useradd, *no_login, user], check=False, capture_output=True)
    return _entry(user)


# Its folders -----------------------------------------------------------------------------------------------


def open_way(root: Path, account: Account) -> None:
    """Let `account` enter `root`; EmbeddedError names a folder above `root` that is closed to it."""
    if account.switch:
        root.chmod(0o755)  # private folders in it have modes of their own
    if barred := account.barred_from(root):
        raise EmbeddedError(
            f"the user {account.name}, who runs PostgreSQL, cannot enter {barred};"
            f" choose a folder elsewhere (DL_HOME), or: chmod o+x {barred}"
        )


def private(folder: Path, account: Account) -> Path:
    """Make `folder`, for `account` alone; EmbeddedError when the folder belongs to another user."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # Checked after mkdir, since in /tmp another user may have made the folder first.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or (not account.switch and status.st_uid != account.uid):
        raise EmbeddedError(f"{folder} is not a folder of the user {account.name}; remove it")
    # Root may take over another user's folder inside ours, but not in /tmp.
    if folder.parent == TMP and status.st_uid not in (account.uid, os.geteuid()):
        raise EmbeddedError(f"{folder} belongs to another user; remove it, or choose a shorter DL_HOME")
    os.chown(folder, account.uid, account.gid, follow_symlinks=False)
    folder.chmod(0o700)
    return folder


def take_over(data: Path, account: Account) -> None:
    """Make `account` the owner of the cluster in `data`; EmbeddedError when only root could do so."""
    owner = data.stat().st_uid
    if owner == account.uid:
        return
    if not account.switch:
        raise EmbeddedError(
            f"{data} belongs to another user (id {owner}); start as that user or as root,"
            " or choose another folder (DL_HOME)"
        )
    for path in chain([data], data.rglob("*")):  # a container's image may give the user another id
        os.chown(path, account.uid, account.gid, follow_symlinks=path == data)
