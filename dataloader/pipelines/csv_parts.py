"""A load of CSV records: by one transaction, or in parts, each committed with its checkpoint.

A run after another one goes on behind the last part. The parts go into a staging table of the job, which lasts until
its end. The target changes in the last transaction alone, as it does for a load by one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import psycopg

from dataloader.pipelines import Context, PermanentError, Progress
from dataloader.pipelines.csv_source import Place
from dataloader.pipelines.csv_table import Load, Source, Wanted, is_permanent, name_of, reason_of

PART_BYTES = 8 * 2**20  # a run that is killed reads as much once more, at most, and one batch


class Parts:
    """The load of one source: staged in parts, then merged."""

    def __init__(self, context: Context, wanted: Wanted, source: Source, columns: Mapping[str, str]) -> None:
        self._context, self._wanted, self._source, self._columns = context, wanted, source, columns
        self._file = source.identity()

    def run(self) -> Generator[Progress | None, None, Place]:
        """Load the source and return its end; parts that earlier runs have committed are not read again."""
        saved = self._context.checkpoint or {}
        if saved.get("file") != self._file:
            saved = {}  # there is none, or another source is there by now: nothing of the former is in the target
        place = None
        if "place" in saved:
            place = Place(*saved["place"])._replace(literal_quotes=saved.get("literal_quotes", 0))
        if place is None or "merged" not in saved:
            place = yield from self._load(place)
        yield Progress(place.records, place.records)
        return place

    def drop(self) -> None:
        """Drop what is staged: no run goes on with it."""
        with self._context.transaction() as conn:
            self._staged(conn).drop_staging()

    def _load(self, begin: Place | None) -> Generator[Progress | None, None, Place]:
        with self._context.transaction() as conn:
            load = self._staged(conn)
            if begin is None or not load.is_staged():
                load.make_staging()
                begin = None
        records = self._source.records(begin)
        while not (yield from self._stage(records)):
            pass
        return (yield from self._merge())

    def _stage(self, records: Iterator[tuple[int, str]]) -> Generator[Progress, None, bool]:
        """Stage the next part and its place; returns whether it was the last."""
        source = self._source
        before, end, is_last = source.place(), source.bytes_read + PART_BYTES, False
        with self._context.transaction() as conn:
            load = self._staged(conn)
            if before.records and not load.is_staged():
                raise RuntimeError("the server has crashed, and lost what was staged: the next run begins anew")
            while not is_last and source.bytes_read < end:
                is_last = load.copy(source, records) < self._wanted.batch_rows
                yield Progress(source.place().records, source.expected)
            load.require_unchanged(source)
            self._save()
        return is_last

    def _merge(self) -> Generator[None, None, Place]:
        """Merge what is staged into the target; returns the end of the source."""
        with self._context.transaction() as conn:
            load = self._staged(conn)
            end = self._source.place()
            if end.records and not load.is_staged():
                raise RuntimeError("the server has crashed, and lost what was staged: the next run begins anew")
            yield from load.find_table()
            yield from load.merge()
            load.drop_staging()
            self._save(merged=end.records)
        return end

    def _save(self, **more: int) -> None:
        # Version 0.1 reads a place of three values.
        *place, literal_quotes = self._source.place()
        self._context.save({"file": self._file, "place": place, "literal_quotes": literal_quotes} | more)

    def _staged(self, conn: psycopg.Connection[Any]) -> Load:
        return Load(conn, self._wanted, self._columns, name_of(self._context.job_id))


def load(
    context: Context,
    wanted: Wanted,
    source: Source,
    columns: Mapping[str, str],
    total: int | None = None,
    in_parts: bool = False,
) -> Generator[Progress | None, None, Place]:
    """Make the table's rows equal to the source's of the same keys, and return the source's end.

    `columns` have the types that a new table gets. `total` is the number of its records, where somebody knows. Raises
    PermanentError for what the table refuses, and psycopg.Error for what another attempt may heal.
    """
    how = _in_parts(context, wanted, source, columns) if in_parts else _at_once(context, wanted, source, columns, total)
    try:
        return (yield from how)
    except psycopg.Error as e:
        if not is_permanent(e):
            raise
        # Not `from e`: its DETAIL quotes rows.
        reason = reason_of(e, wanted.table, columns)
        raise PermanentError(f"{wanted.origin} into {wanted.table}: {reason}") from None


def _at_once(
    context: Context, wanted: Wanted, source: Source, columns: Mapping[str, str], total: int | None
) -> Generator[Progress | None, None, Place]:
    with context.transaction() as conn:
        load = Load(conn, wanted, columns)
        yield from load.find_table()
        yield from load.stage(source, total)
        yield from load.merge()
        end = source.place()
        yield Progress(end.records, end.records)
    return end


def _in_parts(
    context: Context, wanted: Wanted, source: Source, columns: Mapping[str, str]
) -> Generator[Progress | None, None, Place]:
    """An error for good drops what is staged."""
    parts = Parts(context, wanted, source, columns)
    try:
        return (yield from parts.run())
    except (PermanentError, psycopg.Error) as e:
        if isinstance(e, PermanentError) or is_permanent(e):
            parts.drop()
        raise
