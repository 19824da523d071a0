"""A file as it comes: a part beside its place, with checkpoints, which then takes the place at once.

The part of a job belongs to its newest run: a run that is still alive holds a lock on its part, and the next run begins
one of its own. Beside a file that was fetched there is a note of its version (`.NAME.http`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from dataloader.pipelines import Context, PermanentError

_LEFT_SEC = 7 * 86_400  # after which the part of another job goes, which has ended without its file


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
        _clear(place)
        part = cls(place, context, url)
        if saved.get("url") != _hash(url) or not part._take_over(saved):
            part._open_new()
        try:
            yield part
        finally:
            if not part._saved:  # no run goes on with it
                part._path.unlink(missing_ok=True)
            os.close(part._file)

    def __init__(self, place: Place, context: Context, url: str) -> None:
        self._place, self._context, self._url = place, context, url
        self._file = -1
        self._path = Path()
        self._saved = 0
        self.size = 0
        self.version = Version()
        self._is_resumable = True  # a part that is taken over was

    def write(self, piece: bytes, saved_bytes: int) -> None:
        """Add a piece; once so many bytes have come since, save where the next run goes on."""
        view = memoryview(piece)
        while view:
            written = os.pwrite(self._file, view, self.size)
            self.size += written
            view = view[written:]
        if self.size >= self._saved + saved_bytes:
            self.save()

    def save(self) -> None:
        """Save where the next run goes on, unless the server cannot send the rest."""
        if self.size > self._saved and self._is_resumable:
            os.fdatasync(self._file)
            self._saved = self.size
            self._context.save(
                {"url": _hash(self._url), "part": self._path.name, "bytes": self.size, "version": list(self.version)}
            )

    def begin_anew(self, version: Version, is_resumable: bool) -> None:
        """Forget what the part has; what comes is of this version, and the server can send the rest of it, or not.

        It goes into a file of its own: the checkpoint may name the former, as a part of the former version.
        """
        if self.size:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
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
        os.fsync(self._file)
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
        if os.fstat(file).st_size < saved["bytes"]:
            os.close(file)
            return False
        os.ftruncate(file, saved["bytes"])
        self._file, self._path, self.size, self._saved = file, path, saved["bytes"], saved["bytes"]
        self.version = Version(*saved["version"])
        return True


def _locked(path: Path, flags: int) -> int:
    """The part, open and locked; raises OSError where a run that is alive holds it."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o640)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def _clear(place: Place) -> None:
    """Remove the parts of this file that no run has written to for long."""
    for path in place.folder.glob(f".{_escaped(place.name)}.*.part"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _LEFT_SEC:
                path.unlink()


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _stat(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def _hash(url: str) -> str:
    """A URL may hold a secret, so notes and checkpoints have its hash."""
    return hashlib.sha256(url.encode()).hexdigest()
