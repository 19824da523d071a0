"""`load.http` downloads a file from a URL into the data folder. docs/fetch.md is its page for users.

A run writes the bytes to a part file in the folder of the target, with checkpoints, and renames the whole part to the
target. The next run continues in this part. A live run locks its part; then the next run begins a part of its own.
The note `.NAME.http` in the same folder has the version that was downloaded.
"""

from __future__ import annotations

import fcntl
import glob
import gzip
import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Generator
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

from pydantic import AfterValidator, Field

from dataloader import config
from dataloader.pipelines import Arguments, Context, FilePath, PermanentError, Progress, http, register, validated
from dataloader.pipelines.http import Answer, Unreachable

CONNECT_SEC = 15.0
SILENCE_SEC = 60.0  # the longest wait for the next byte
SAVED_BYTES = 8 * 2**20  # between two checkpoints: at most so much is fetched again after a kill
_CHUNK_BYTES = 2**16
_GZIP = ("gzip", "x-gzip")  # decoded: object stores send a file that is stored so even if the request forbids it
_UNSATISFIABLE = 416
_ABANDONED_SEC = 7 * 86_400  # a part without a write for so long is removed, of any job


class Wanted(Arguments):
    """The `args` of `load.http`; docs/fetch.md explains each."""

    url: Annotated[str, Field(max_length=8_192), AfterValidator(http.checked_url)]
    path: FilePath


@register("load.http", spares_attempts=True)
def load_http(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, dict[str, Any]]:
    """Download the URL to the file `path` below the data folder; return its size, and whether it has changed.

    The new file replaces the old one as a whole. If the server sends versions (ETag, Last-Modified), an unchanged file
    is not fetched again, and a run after an interrupted one fetches only the rest. A wrong argument, a refused address,
    an answer without a file and a file that is too large raise PermanentError. Silence, a broken connection and a
    temporary status are tried again. An error shows only the host of the URL.
    """
    wanted = validated(Wanted, args)
    return (yield from fetch(wanted.url, wanted.path, context))


def fetch(url: str, path: str, context: Context) -> Generator[Progress | None, None, dict[str, Any]]:
    """Download the URL as `load.http` does."""
    settings, times = config.load(), http.Times(CONNECT_SEC, SILENCE_SEC)
    guard = http.guard_but(settings.dl_http_private_hosts)
    with closing(Part(context, url, path)) as part:
        known = None if part.size else part.present_version()
        headers = {}  # ask for the rest of the part, or for a body only if the file has changed
        if part.size:
            headers = {"Range": f"bytes={part.size}-", "If-Range": part.version.strong}
        elif known is not None:
            conditions = {"If-None-Match": known.etag, "If-Modified-Since": known.modified}
            headers = {name: value for name, value in conditions.items() if value}
        with http.get(url, times, headers, guard=guard, check=context.check) as answer:
            if answer.status == _UNSATISFIABLE and part.size:
                if answer.headers.get("Content-Range") != f"bytes */{part.size}":
                    part.drop()
                    raise Unreachable(f"{answer.name} has a shorter file than before: the next run fetches all of it")
            elif answer.status == 304 and known is not None:
                yield Progress(known.size, known.size)
                # An earlier run of this job may have downloaded it, and died before its end was written.
                return {"changed": known.job == str(context.job_id), "bytes": known.size, "host": answer.name}
            elif answer.status in (200, 206):
                yield from _receive(answer, part, settings.dl_http_max_mb * 2**20)
            else:
                answer.require_final()
                why = "there is no file for this worker at this address"
                raise PermanentError(f"{answer.name} answered {answer.status}: {why}")
        part.put_in_place()
        return {"changed": True, "bytes": part.size, "host": answer.name}


def _receive(answer: Answer, part: Part, max_bytes: int) -> Generator[Progress, None, None]:
    """Append the answer to the part, with a checkpoint after each SAVED_BYTES."""
    coding = (answer.headers.get("Content-Encoding") or "identity").lower()
    transfer = (answer.headers.get("Transfer-Encoding") or "chunked").lower()
    if coding not in ("identity", *_GZIP) or transfer != "chunked":
        raise PermanentError(f"{answer.name} sends the file encoded, although the request forbids it")
    is_gzip = coding in _GZIP  # then the answer has other bytes than the file
    version = Version(answer.headers.get("ETag") or "", answer.headers.get("Last-Modified") or "")
    if answer.status == 200:
        part.begin_anew(version, is_resumable=not is_gzip)
        total = None if is_gzip else answer.length
    elif is_gzip or not part.size or (total := _total_of_rest(answer, part, version)) is None:
        part.drop()
        raise Unreachable(f"{answer.name} sent another part of the file than the request asks for")
    if total is not None and total > max_bytes:
        part.drop()
        raise PermanentError(f"{answer.name} has a file of {total} bytes, and DL_HTTP_MAX_MB allows {max_bytes}")
    plain: Any = answer  # GzipFile calls only its `read`
    body = gzip.GzipFile(fileobj=plain) if is_gzip else plain
    try:
        while chunk := body.read(_CHUNK_BYTES):
            if part.size + len(chunk) > max_bytes:
                part.drop()
                raise PermanentError(f"{answer.name} has a file of more bytes than DL_HTTP_MAX_MB allows: {max_bytes}")
            part.write(chunk)
            yield Progress(part.size, total)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise Unreachable(f"{answer.name} sends a damaged file: its gzip data is not valid") from None
    if total is not None and part.size < total:
        part.save()
        raise Unreachable(f"{answer.name} has sent {part.size} of {total} bytes: the next run fetches the rest")


def _total_of_rest(answer: Answer, part: Part, version: Version) -> int | None:
    """The size of the whole file; None if the answer does not continue the part in the same version.

    A server may send less than the request asks for, so the answer need not reach the end of the file.
    """
    byte_range = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range") or "")
    if not byte_range or (version.etag and version.etag != part.version.etag):
        return None
    first, last, total = map(int, byte_range.groups())
    return total if first == part.size <= last < total else None


class Version(NamedTuple):
    """The names that a server gives to a version of its file."""

    etag: str = ""
    modified: str = ""  # Last-Modified
    size: int = 0  # of the downloaded file
    job: str = ""  # the id of the job that downloaded it

    @property
    def strong(self) -> str:
        """The ETag for a request of the rest of this version; "" if there is none, or only a weak one.

        A date is not exact enough: the file may change twice in a second.
        """
        return "" if self.etag.startswith("W/") else self.etag


class Part:
    """The part file of one run, beside its target. A later run of the job may continue in it."""

    def __init__(self, context: Context, url: str, path: str) -> None:
        """Continue in the part of the checkpoint, cut to it; begin a new part if that one cannot be continued.

        Makes the folders of `path`. Raises PermanentError for a path outside of the data folder.
        """
        saved = context.checkpoint or {}
        self._context, self._target = context, _target(context.data_dir, path)
        self._note = self._target.with_name(f".{self._target.name}.http")  # the version of the target
        self._url = hashlib.sha256(url.encode()).hexdigest()  # for the note and checkpoints: a URL may hold a secret
        self._file: BinaryIO
        self._path: Path
        self.size = self._saved = 0
        self.version = Version()
        self._is_resumable = True  # so is each part with a checkpoint
        for old in self._target.parent.glob(f".{glob.escape(self._target.name)}.*.part"):
            with suppress(OSError):
                if old.stat().st_mtime < time.time() - _ABANDONED_SEC:
                    old.unlink()
        if saved.get("url") != self._url or not self._take_over(saved):
            self._open_new()

    def close(self) -> None:
        """Close the file, and remove it unless a later run can continue in it."""
        if not self._saved:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def present_version(self) -> Version | None:
        """The version of the target; None if it was changed, or did not come from this URL."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            noted = json.loads(self._note.read_text("utf-8"))
            if noted["file"] == _stat(self._target) and noted["url"] == self._url:
                return Version(noted["etag"], noted["modified"], noted["file"][0], noted["job"])
        return None

    def write(self, chunk: bytes) -> None:
        """Append the chunk; save a checkpoint after each SAVED_BYTES."""
        self._file.write(chunk)
        self.size += len(chunk)
        if self.size >= self._saved + SAVED_BYTES:
            self.save()

    def save(self) -> None:
        """Save a checkpoint for the next run, unless the server cannot send the rest."""
        if self.size > self._saved and self._is_resumable:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._saved = self.size
            checkpoint = {"url": self._url, "part": self._path.name}
            self._context.save(checkpoint | {"bytes": self.size, "version": list(self.version)})

    def begin_anew(self, version: Version, is_resumable: bool) -> None:
        """Begin at byte 0 with this version of the file.

        A new part file is used, because the checkpoint may name the old one as a part of the old version.
        """
        if self.size:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._open_new()
        self.size = self._saved = 0
        self.version = version
        self._is_resumable = is_resumable and bool(version.strong)

    def drop(self) -> None:
        """Remove the part, so that no run continues in it."""
        self.size = self._saved = 0
        self._path.unlink(missing_ok=True)

    def put_in_place(self) -> None:
        """Rename the whole part to the target, and note its version."""
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._path, self._target)
        noted: dict[str, Any] = {"url": self._url, "file": _stat(self._target), "job": str(self._context.job_id)}
        noted |= {"etag": self.version.etag, "modified": self.version.modified}
        draft = self._note.with_name(f"{self._note.name}.{os.getpid()}")
        draft.write_text(json.dumps(noted), "utf-8")
        os.replace(draft, self._note)

    def _open_new(self) -> None:
        name = f".{self._target.name}.{self._context.job_id}.{self._context.claim}.part"
        self._path = self._target.with_name(name)
        self._file = _locked(self._path, os.O_CREAT | os.O_TRUNC)

    def _take_over(self, saved: dict[str, Any]) -> bool:
        """Continue in the part of the checkpoint; False if it is missing or too short, or a live run holds its lock."""
        path = self._target.parent / str(saved["part"])
        try:
            file = _locked(path, 0)
        except OSError:
            return False
        if file.seek(0, os.SEEK_END) < saved["bytes"]:
            file.close()
            return False
        file.truncate(file.seek(saved["bytes"]))
        self._file, self._path, self.size, self._saved = file, path, saved["bytes"], saved["bytes"]
        self.version = Version(*saved["version"])
        return True


def _target(root: Path, path: str) -> Path:
    """The file `path` below the data folder; makes its folders. Raises PermanentError for a path outside."""
    real = Path(os.path.realpath(root))
    folder = Path(os.path.realpath(real / os.path.dirname(path)))
    name = os.path.basename(path)
    if name in ("", ".", "..") or not folder.is_relative_to(real):
        raise PermanentError(f"path: {path} should be a file below the data folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise PermanentError(f"path: {path} should have folders before its last /") from None
    if (folder / name).is_dir():
        raise PermanentError(f"path: {path} is a folder")
    return folder / name


def _locked(path: Path, flags: int) -> BinaryIO:
    """Open and lock the part; raises OSError if a live run holds its lock."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o640), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _stat(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]
