"""`load.http`: a file by its URL into the data folder. docs/fetch.md is the page for people.

The file comes into a part beside its place, with checkpoints, and then takes the place at once. The part of a job
belongs to its newest run: a run that is still alive holds a lock on its part, and the next run begins one of its own.
Beside a file that was fetched there is a note of its version (`.NAME.http`).
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
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

from pydantic import AfterValidator, Field

from dataloader import config
from dataloader.config import Settings
from dataloader.pipelines import Arguments, Context, FilePath, PermanentError, Progress, http, register, validated
from dataloader.pipelines.http import Answer, Refused, Unreachable

CONNECT_SEC = 15.0
SILENCE_SEC = 60.0  # without a byte
SAVED_BYTES = 8 * 2**20  # between two checkpoints; a run that is killed fetches as much once more, at most
_PIECE = 2**16
_GZIP = ("gzip", "x-gzip")  # decoded, because object stores send what is stored so, also when asked not to
_UNSATISFIABLE = 416
_LEFT_SEC = 7 * 86_400  # after which the part of another job goes, which has ended without its file


class Wanted(Arguments):
    """The `args` of `load.http`; docs/fetch.md explains each."""

    url: Annotated[str, Field(max_length=8_192), AfterValidator(http.checked_url)]
    path: FilePath


@register("load.http", spares_attempts=True)
def load_http(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, dict[str, Any]]:
    """Make the file `path` of the data folder what the URL has; return its size, and whether it has changed.

    The file is in its place as a whole or as it was before. Where the server knows versions (ETag, Last-Modified), a
    file that has not changed is not fetched again, and a run after one that was broken off fetches the rest. A wrong
    argument, a refused address, an answer that is no file and a file that is too large raise PermanentError; silence, a
    broken connection and a passing status are tried again. No error shows more of the URL than its host.
    """
    wanted = validated(Wanted, args)
    settings = config.load()
    place = Place.below(context.data_dir, wanted.path)
    try:
        with Part.open(place, context, wanted.url) as part:
            return (yield from _fetched(wanted.url, place, part, context, settings))
    except Refused as e:
        raise PermanentError(str(e)) from None


def _fetched(
    url: str, place: Place, part: Part, context: Context, settings: Settings
) -> Generator[Progress | None, None, dict[str, Any]]:
    def is_refused(host: str, address: str) -> bool:
        is_private = host in settings.dl_http_private_hosts
        return http.is_forbidden(address) if is_private else http.is_internal(address)

    known = None if part.size else place.version_of(url)
    headers = {}  # by which the server sends the rest of a part, or no body of a file that is known
    if part.size:
        headers = {"Range": f"bytes={part.size}-", "If-Range": part.version.strong}
    elif known is not None:
        given = {"If-None-Match": known.etag, "If-Modified-Since": known.modified}
        headers = {name: value for name, value in given.items() if value}
    times = http.Times(CONNECT_SEC, SILENCE_SEC)
    with http.get(url, times, headers, guard=is_refused, check=context.check) as answer:
        if answer.status == _UNSATISFIABLE and part.size:
            if answer.headers.get("Content-Range") != f"bytes */{part.size}":
                part.drop()
                raise Unreachable(f"{answer.name} has less of the file than before: the next run fetches it anew")
        elif answer.status == 304 and known is not None:
            yield Progress(known.size, known.size)
            # A run of this job before may have put it there, and died before its end was written.
            return {"changed": known.job == str(context.job_id), "bytes": known.size, "host": answer.name}
        elif answer.status in (200, 206):
            yield from _received(answer, part, settings.dl_http_max_mb * 2**20)
        else:
            answer.require_final()
            why = "there is no file for this worker at this address"
            raise PermanentError(f"{answer.name} answered {answer.status}: {why}")
    part.put_in_place()
    return {"changed": True, "bytes": part.size, "host": answer.name}


def _received(answer: Answer, part: Part, most: int) -> Generator[Progress, None, None]:
    """Write the answer behind what the part has of it, with a checkpoint for each SAVED_BYTES."""
    coding = (answer.headers.get("Content-Encoding") or "identity").lower()
    transfer = (answer.headers.get("Transfer-Encoding") or "chunked").lower()
    if coding not in ("identity", *_GZIP) or transfer != "chunked":
        raise PermanentError(f"{answer.name} sends the file encoded, though it was asked not to")
    is_gzip = coding in _GZIP  # then the bytes of the answer are not those of the file
    version = Version(answer.headers.get("ETag") or "", answer.headers.get("Last-Modified") or "")
    if answer.status == 200:
        part.begin_anew(version, is_resumable=not is_gzip)
        total = None if is_gzip else answer.length
    elif is_gzip or not part.size or (total := _total_of_rest(answer, part, version)) is None:
        part.drop()
        raise Unreachable(f"{answer.name} answered with another part of the file than it was asked for")
    if total is not None and total > most:
        part.drop()
        raise PermanentError(f"{answer.name} has a file of {total} bytes, and DL_HTTP_MAX_MB allows {most}")
    plain: Any = answer  # of a file GzipFile needs `read` alone
    body = gzip.GzipFile(fileobj=plain) if is_gzip else plain
    try:
        while piece := body.read(_PIECE):
            if part.size + len(piece) > most:
                part.drop()
                raise PermanentError(f"{answer.name} has a file of more than DL_HTTP_MAX_MB allows, {most} bytes")
            part.write(piece)
            yield Progress(part.size, total)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise Unreachable(f"{answer.name} sends a file that is damaged: it is no whole gzip") from None
    if total is not None and part.size < total:
        part.save()
        raise Unreachable(f"{answer.name} has sent {part.size} of {total} bytes: the next run fetches the rest")


def _total_of_rest(answer: Answer, part: Part, version: Version) -> int | None:
    """The size of the file, where the answer goes on with the part's version at its end; None where it does not.

    A server may send less than it was asked for, so the answer need not reach the end of the file.
    """
    byte_range = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range") or "")
    if not byte_range or (version.etag and version.etag != part.version.etag):
        return None
    first, last, total = map(int, byte_range.groups())
    return total if first == part.size <= last < total else None


class Version(NamedTuple):
    """What a server calls a version of its file."""

    etag: str = ""
    modified: str = ""  # a date of HTTP
    size: int = 0  # of the file that was fetched
    job: str = ""  # that has fetched it

    @property
    def strong(self) -> str:
        """The ETag by which a server may be asked for the rest of this version; "": it may not.

        A date would not do: the file may change twice in a second.
        """
        return "" if self.etag.startswith("W/") else self.etag


class Place(NamedTuple):
    """Where the file is to be: a real folder below the data folder, and the name there."""

    folder: Path
    name: str

    @classmethod
    def below(cls, root: Path, path: str) -> Place:
        """The place of a path below the data folder, whose folders it makes; raises PermanentError for another."""
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
        return cls(folder, name)

    @property
    def file(self) -> Path:
        """The file itself."""
        return self.folder / self.name

    @property
    def note(self) -> Path:
        """Where the version of the file is noted."""
        return self.folder / f".{self.name}.http"

    def version_of(self, url: str) -> Version | None:
        """The version of the file that is there, as it was fetched from this URL; None: not so, or it was changed."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            noted = json.loads(self.note.read_text("utf-8"))
            if noted["file"] == _stat(self.file) and noted["url"] == _hash(url):
                return Version(noted["etag"], noted["modified"], noted["file"][0], noted["job"])
        return None

    def remember(self, url: str, version: Version) -> None:
        """Note the version of the file that is there."""
        noted: dict[str, Any] = {"url": _hash(url), "file": _stat(self.file)}
        noted |= {"etag": version.etag, "modified": version.modified, "job": version.job}
        draft = self.note.with_name(f"{self.note.name}.{os.getpid()}")
        draft.write_text(json.dumps(noted), "utf-8")
        os.replace(draft, self.note)


class Part:
    """The part of one run; a run after another one goes on in the other's part."""

    @classmethod
    @contextmanager
    def open(cls, place: Place, context: Context, url: str) -> Iterator[Part]:
        """The part of the run before as its checkpoint says, where it is there and the server can send the rest."""
        saved = context.checkpoint or {}
        for path in place.folder.glob(f".{glob.escape(place.name)}.*.part"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - _LEFT_SEC:
                    path.unlink()
        part = cls(place, context, url)
        if saved.get("url") != _hash(url) or not part._take_over(saved):
            part._open_new()
        try:
            yield part
        finally:
            if not part._saved:  # no run goes on with it
                part._path.unlink(missing_ok=True)
            part._file.close()

    def __init__(self, place: Place, context: Context, url: str) -> None:
        self._place, self._context, self._url = place, context, url
        self._file: BinaryIO
        self._path: Path
        self.size = self._saved = 0
        self.version = Version()
        self._is_resumable = True  # a part that is taken over was

    def write(self, piece: bytes) -> None:
        """Add a piece; once SAVED_BYTES have come since, save where the next run goes on."""
        self._file.write(piece)
        self.size += len(piece)
        if self.size >= self._saved + SAVED_BYTES:
            self.save()

    def save(self) -> None:
        """Save where the next run goes on, unless the server cannot send the rest."""
        if self.size > self._saved and self._is_resumable:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._saved = self.size
            kept = {"url": _hash(self._url), "part": self._path.name}
            self._context.save(kept | {"bytes": self.size, "version": list(self.version)})

    def begin_anew(self, version: Version, is_resumable: bool) -> None:
        """Forget what the part has; what comes is of this version, and the server can send the rest of it, or not.

        It goes into a file of its own: the checkpoint may name the former, as a part of the former version.
        """
        if self.size:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._open_new()
        self.size = self._saved = 0
        self.version = version
        self._is_resumable = is_resumable and bool(version.strong)

    def drop(self) -> None:
        """Remove the part: no run goes on with it."""
        self.size = self._saved = 0
        self._path.unlink(missing_ok=True)

    def put_in_place(self) -> None:
        """Put the whole file in its place, at once, and note its version."""
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._path, self._place.file)
        self._place.remember(self._url, self.version._replace(job=str(self._context.job_id)))

    def _open_new(self) -> None:
        self._path = self._place.folder / f".{self._place.name}.{self._context.job_id}.{self._context.claim}.part"
        self._file = _locked(self._path, os.O_CREAT | os.O_TRUNC)

    def _take_over(self, saved: dict[str, Any]) -> bool:
        """Go on in the part of the run before; False where it is not there, or its run is alive."""
        path = self._place.folder / str(saved["part"])
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


def _locked(path: Path, flags: int) -> BinaryIO:
    """The part, open and locked; raises OSError where a run that is alive holds it."""
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


def _hash(url: str) -> str:
    """A URL may hold a secret, so notes and checkpoints have its hash."""
    return hashlib.sha256(url.encode()).hexdigest()
