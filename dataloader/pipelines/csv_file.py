"""`load.csv`: a CSV file into a table, by key, all of it or nothing.

The pipeline copies the records into a staging table like the target, so that PostgreSQL's own rules for CSV and for its
types apply. One rule differs: a quote within a field is literal (csv_source). Then the pipeline merges the rows into
the target. A file of up to PART_BYTES it reads twice, first to count the records and to find invalid text and broken
ones; all that follows is one transaction. A larger one it reads once, in parts (csv_parts).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from dataloader.pipelines import Context, Progress, csv_parts, register, validated
from dataloader.pipelines.csv_source import Arguments, Source, open_file


@register("load.csv", spares_attempts=True)
def load_csv(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, Progress | None]:
    """Make the rows of `table` with the file's keys equal to the file's, in one transaction.

    A second run changes nothing. The last of several records with the same key counts. A wrong argument, a bad
    record or a table that does not fit raises PermanentError and leaves the table unchanged. A run after another one
    that ended in the middle of a large file goes on there, unless the file has changed. The result is None, or the
    progress with the number of the quotes that were read literally.
    """
    wanted = validated(Arguments, args)
    with open_file(context.data_dir, wanted) as stream:
        source = Source(wanted, stream)
        columns = dict.fromkeys(source.columns(), "text")
        is_large = source.size > csv_parts.PART_BYTES
        total = None if is_large else (yield from source.count())
        end = yield from csv_parts.load(context, wanted, source, columns, total, in_parts=is_large)
    if not end.literal_quotes:
        return None
    context.logger.warning("%s: %s quotes within fields were read literally", wanted.path, end.literal_quotes)
    return Progress(end.records, end.records, literal_quotes=end.literal_quotes)
