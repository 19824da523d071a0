"""Files of other machines for `load.files`: each run downloads them below the data folder, and then loads them there.

So a stalled network holds no transaction, and no format needs to know where its bytes come from. The folder belongs to
the job: a later run finds what an earlier one has downloaded. No error shows the URL of a source, which has passwords.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from dataloader import config, log
from dataloader.pipelines import Context, PermanentError, Progress, download
from dataloader.pipelines.download import CONNECT_SEC
from dataloader.pipelines.http import Unreachable, checked_url, required

_FOLDER = ".dl_remote"
_CHUNK_BYTES = 2**20
_ABANDONED_SEC = 7 * 86_400
_SCHEMES = ("s3", "gs", "abfs", "abfss", "sftp")
_FAULT = re.compile(
    r"AWS Error ([A-Z_]+)|Azure Error: \[(\w+)|Status\(([A-Z_]+)|\d([A-Z][a-zA-Z]+)E:"
    r"|(?:Error|status)[: ]+([A-Za-z]+)\b"
)


def is_remote(path: str, source: str | None) -> bool:
    """PURE: whether the path names files of another machine."""
    return source is not None or urlsplit(path).scheme in ("http", "https", *_SCHEMES)


def fetched(path: str, source: str | None, context: Context) -> Generator[Progress | None, None, str]:
    """Download the file, the folder or the files of a glob into the data folder; return the path of the copy there.

    Raises PermanentError where there is none, and Unreachable without an answer.
    """
    _remove_abandoned(context.data_dir.parent)
    if urlsplit(path).scheme in ("http", "https"):
        return (yield from _over_http(path, context))
    if source is None:
        raise PermanentError(f"source: should name the variable {config.SOURCES}<NAME> that has the URL of the source")
    with _translated(source), ExitStack() as stack:
        system, root, inner = _opened(source, path, stack)
        files = _chosen(system, root, inner)
        if not files:
            raise PermanentError(f"path: {path}: the source {source} has no such file")
        total = sum(file.size for file in files)
        done = 0
        targets = [context.data_dir / file.path[len(root) :].lstrip("/") for file in files]
        for copy in {each for each in context.data_dir.rglob("[!.]*") if each.is_file()}.difference(targets):
            copy.unlink(missing_ok=True)  # of an earlier run, and no longer at the source
        for file, target in zip(files, targets, strict=True):
            for size in _copied(system, file, target, context.claim):
                done += size
                yield Progress(done, total)
    return inner


def folder_of(context: Context) -> Path:
    """The job's folder for what it downloads."""
    return context.data_dir / _FOLDER / str(context.job_id)


def drop(context: Context) -> None:
    """Remove what the job has downloaded."""
    shutil.rmtree(folder_of(context), ignore_errors=True)


def _over_http(url: str, context: Context) -> Generator[Progress | None, None, str]:
    try:
        name = re.sub(r"[^\w.-]", "_", unquote(PurePosixPath(urlsplit(checked_url(url)).path).name))[-100:].lstrip(".")
    except ValueError as e:
        raise PermanentError(f"path: {e}") from None
    name = name or "file"
    yield from download.fetch(url, name, context)  # asks whether the copy of an earlier run is still right
    return name


def _opened(source: str, path: str, stack: ExitStack) -> tuple[Any, str, str]:
    """The file system of the source, its root, and the path below that."""
    try:
        from pyarrow import fs
    except ModuleNotFoundError:
        raise PermanentError("source: needs pyarrow: pip install 'dataloader-farm[files]'") from None
    variable = config.SOURCES + source.upper()
    url = required(variable, config.source_url(source))
    log.learn_secret(url)
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        raise PermanentError(
            f"{variable} should be a URL of {', '.join(_SCHEMES)}, such as s3://KEY:SECRET@bucket/folder"
        )
    try:
        system, root = _sftp(source, url, stack) if scheme == "sftp" else fs.FileSystem.from_uri(url)
    except (ValueError, TypeError):  # their texts show the URL
        raise PermanentError(f"{variable} is no URL that pyarrow can use") from None
    if urlsplit(path).scheme or ".." in PurePosixPath(path).parts:
        raise PermanentError(f"path: {path} should be below the folder of the source {source}, without its URL")
    return system, root.rstrip("/"), path.strip("/")


def _sftp(source: str, url: str, stack: ExitStack) -> tuple[Any, str]:
    from fsspec.core import url_to_fs
    from paramiko import HostKeys, MissingHostKeyPolicy
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    class Known(MissingHostKeyPolicy):  # type: ignore[misc]
        """Takes no host whose key is not among the known ones: it would learn the password."""

        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            hosts = Path("~/.ssh/known_hosts").expanduser()
            if not hosts.exists() or not HostKeys(str(hosts)).check(hostname, key):
                raise Unreachable(f"source {source}: the key of {hostname} is not in ~/.ssh/known_hosts of this worker")

    system, root = url_to_fs(url, host_key_policy=Known(), timeout=CONNECT_SEC, skip_instance_cache=True)
    stack.callback(system.client.close)
    return PyFileSystem(FSSpecHandler(system)), root


def _chosen(system: Any, root: str, inner: str) -> list[Any]:
    """The files of a path, sorted; those of a folder or a glob are below it, and none is hidden."""
    from pyarrow.fs import FileSelector, FileType

    parts = inner.split("/") if inner else []
    fixed = next((n for n, part in enumerate(parts) if re.search(r"[*?[]", part)), len(parts))
    base = "/".join([root, *parts[:fixed]])
    here = system.get_file_info(base)
    if here.type == FileType.File:
        return [here] if fixed == len(parts) else []
    selector = FileSelector(
        base, allow_not_found=True, recursive=fixed == len(parts) or "**" in parts or fixed < len(parts) - 1
    )
    pattern = "/".join(parts[fixed:]).replace("**/", "*") or "*"
    files = []
    for each in system.get_file_info(selector):
        name = each.path[len(base) + 1 :]
        if each.type == FileType.File and fnmatchcase(name, pattern) and not re.search(r"(?:^|/)(?:[._]|~\$)", name):
            files.append(each)
    return sorted(files, key=lambda each: each.path)


def _copied(system: Any, file: Any, target: Path, claim: int) -> Iterator[int]:
    """Copy the file, with its time, for the version of a copy must not depend on the run; yields sizes."""
    with suppress(FileNotFoundError):
        status = target.stat()
        if (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns or status.st_mtime_ns):
            yield file.size
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{claim}.part")
    with system.open_input_stream(file.path, compression=None) as stream, part.open("wb") as copy:
        while piece := stream.read(_CHUNK_BYTES):
            copy.write(piece)
            yield len(piece)
    now = system.get_file_info(file.path)
    if (now.size, now.mtime_ns) != (file.size, file.mtime_ns) or part.stat().st_size != file.size:
        raise Unreachable(f"{PurePosixPath(file.path).name} has changed during the download")
    if file.mtime_ns:
        os.utime(part, ns=(file.mtime_ns, file.mtime_ns))
    part.replace(target)


@contextmanager
def _translated(source: str) -> Iterator[None]:
    """Raise the errors of the file systems without their texts, which may show the source's URL."""
    try:
        yield
        return
    except FileNotFoundError:
        fault = "a file was removed during the download"
    except Exception as e:
        is_of_arrow = isinstance(e, OSError) or type(e).__module__.startswith("pyarrow")
        if not is_of_arrow and not type(e).__module__.startswith("paramiko"):
            raise
        match = _FAULT.search(str(e)) if is_of_arrow else None
        fault = match[match.lastindex or 0] if match else type(e).__name__
    where = f"{config.SOURCES}{source.upper()}"
    raise Unreachable(f"the source {source} cannot be read: {fault}; its URL is in {where}") from None


def _remove_abandoned(folder: Path) -> None:
    with suppress(OSError):
        for each in folder.iterdir():
            if each.stat().st_mtime < time.time() - _ABANDONED_SEC:
                shutil.rmtree(each, ignore_errors=True)
