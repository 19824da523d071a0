"""`load.csv`: a CSV file into a table, by key, all of it or nothing.

The pipeline reads the file twice. The first pass counts the records and finds invalid text and broken records. The
second pass copies the records unchanged into a temporary table like the target, so that PostgreSQL's own rules for
CSV and for its types apply. Then the pipeline merges the rows into the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from dataloader.pipelines import Context, PermanentError, Progress, register, validated
from dataloader.pipelines.csv_source import Arguments, Source, open_file
from dataloader.pipelines.csv_table import Load, is_permanent, reason_of


@register("load.csv")
def load_csv(args: dict[str, Any], context: Context) -> Iterator[Progress | None]:
    """Make the rows of `table` with the file's keys equal to the file's, in one transaction.

    A second run changes nothing. The last of several records with the same key counts. A wrong argument, a bad
    record or a table that does not fit raises PermanentError and leaves the table unchanged.
    """
    wanted = validated(Arguments, args)
    with open_file(context.data_dir, wanted) as stream:
        source = Source(wanted, stream)
        columns = source.columns()
        total = yield from source.count()
        try:
            with context.transaction() as conn:
                load = Load(conn, wanted, columns)
                yield from load.find_table()
                yield from load.stage(source, total)
                yield from load.merge()
                yield {"processed": total, "total": total}
        except psycopg.Error as e:
            if not is_permanent(e):
                raise
            # Not `from e`: its DETAIL quotes rows.
            raise PermanentError(f"{wanted.path} into {wanted.table}: {reason_of(e, wanted, columns)}") from None
