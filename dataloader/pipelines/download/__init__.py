"""`load.http`: a file by its URL into the data folder. docs/loaders.md is the page for people.

request     the URL, its redirects, the answer piece by piece
part        the file as it comes: a part beside its place, then in its place at once
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dataloader import config
from dataloader.config import Settings
from dataloader.pipelines import Context, PermanentError, Progress, Retry, register, validated
from dataloader.pipelines.download.part import Part, Place, Version
from dataloader.pipelines.download.request import Answer, checked_url, get
from dataloader.pipelines.outbound import Refused, Unreachable

SAVED_BYTES = 8 * 2**20  # between two checkpoints; a run that is killed fetches as much once more, at most
AGAIN_MOST_SEC = 86_400.0  # that a server may ask for
_PASSING = (408, 425, 429)  # of the 4xx
_UNSATISFIABLE = 416


class Arguments(BaseModel):
    """The `args` of `load.http`; docs/loaders.md explains each."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    url: Annotated[str, Field(max_length=8_192), AfterValidator(checked_url)]
    path: str = Field(min_length=1, max_length=4_096, pattern=r"^[^\x00]+$")


@register("load.http", spares_attempts=True)
def load_http(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, dict[str, Any]]:
    """Make the file `path` of the data folder what the URL has; return its size, and whether it has changed.

    The file is in its place as a whole or as it was before. Where the server knows versions (ETag, Last-Modified), a
    file that has not changed is not fetched again, and a run after one that was broken off fetches the rest. A wrong
    argument, a refused address, an answer that is no file and a file that is too large raise PermanentError; silence, a
    broken connection and a passing status are tried again. No error shows more of the URL than its host.
    """
    wanted = validated(Arguments, args)
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
    known = None if part.size else place.version_of(url)
    with get(url, _conditions(part, known), settings.dl_http_private_hosts, context.check) as answer:
        if answer.status == _UNSATISFIABLE and part.size:
            if not answer.has_just(part.size):
                part.drop()
                raise Unreachable(f"{answer.host} has less of the file than before: the next run fetches it anew")
        elif answer.status == 304 and known is not None:
            yield Progress(known.size, known.size)
            # A run of this job before may have put it there, and died before its end was written.
            return {"changed": known.job == str(context.job_id), "bytes": known.size, "host": answer.host}
        else:
            _require_file(answer)
            yield from _received(answer, part, settings.dl_http_max_mb * 2**20)
    part.put_in_place()
    return {"changed": True, "bytes": part.size, "host": answer.host}


def _conditions(part: Part, known: Version | None) -> dict[str, str]:
    """The headers by which the server sends the rest of a part, or nothing of a file that is known."""
    if part.size:
        return {"Range": f"bytes={part.size}-", "If-Range": part.version.strong}
    if known is None:
        return {}
    given = {"If-None-Match": known.etag, "If-Modified-Since": known.modified}
    return {name: value for name, value in given.items() if value}


def _require_file(answer: Answer) -> None:
    """Raise unless the answer has the file, or a part of it."""
    said = f"{answer.host} answered {answer.status}"
    if answer.status in (200, 206):
        if not answer.is_readable:
            raise PermanentError(f"{answer.host} sends the file encoded, though it was asked not to")
        return
    if answer.again_sec is not None and answer.status in (429, 503):
        raise Retry(min(answer.again_sec, AGAIN_MOST_SEC), f"{said} and asks for {answer.again_sec:g} s")
    if answer.status >= 500 or answer.status in _PASSING:
        raise Unreachable(said)
    raise PermanentError(f"{said}: there is no file for this worker at this address")


def _received(answer: Answer, part: Part, most: int) -> Generator[Progress, None, None]:
    """Write the answer behind what the part has of it, with a checkpoint for each SAVED_BYTES."""
    if answer.status == 200:
        part.begin_anew(answer.version, is_resumable=not answer.is_encoded)
        total = answer.length
    elif not part.size or (total := answer.total_behind(part.size, part.version)) is None:
        part.drop()
        raise Unreachable(f"{answer.host} answered with another part of the file than it was asked for")
    if total is not None and total > most:
        part.drop()
        raise PermanentError(f"{answer.host} has a file of {total} bytes, and DL_HTTP_MAX_MB allows {most}")
    for piece in answer.pieces():
        if part.size + len(piece) > most:
            part.drop()
            raise PermanentError(f"{answer.host} has a file of more than DL_HTTP_MAX_MB allows, {most} bytes")
        part.write(piece, SAVED_BYTES)
        yield Progress(part.size, total)
    if total is not None and part.size < total:
        part.save()
        raise Unreachable(f"{answer.host} has sent {part.size} of {total} bytes: the next run fetches the rest")
