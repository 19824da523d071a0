"""`load.postgres`: the rows of a query in another PostgreSQL into a table, by key, all of it or nothing.

The rows go through the same staging and merge as those of `load.csv`, so the same rules hold for the table. By default
one transaction takes the rows of one. With `resume` they come in the order of the key and in parts (csv_parts), and a
later run goes on behind the last part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dataloader.config import SOURCE_NAME
from dataloader.pipelines import Context, Progress, csv_parts, register, validated
from dataloader.pipelines.csv_source import identifier, table, unique
from dataloader.pipelines.pg_source import Query


class Arguments(BaseModel):
    """The `args` of `load.postgres`; docs/loaders.md explains each."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)
    names_columns: ClassVar[str] = "query"
    hint: ClassVar[str] = ""
    delimiter: ClassVar[str] = ","

    source: str = Field(pattern=SOURCE_NAME)
    query: str = Field(min_length=1, max_length=100_000, pattern=r"^[^\x00]+$")
    table: Annotated[str, AfterValidator(table)]
    key: Annotated[list[Annotated[str, AfterValidator(identifier)]], Field(min_length=1), AfterValidator(unique)]
    resume: bool = False
    batch_rows: int = Field(default=5_000, ge=1, le=1_000_000)

    @property
    def origin(self) -> str:
        """Where the records come from, for people."""
        return f"source {self.source}"


@register("load.postgres", spares_attempts=True)
def load_postgres(args: dict[str, Any], context: Context) -> Iterator[Progress | None]:
    """Make the rows of `table` with the query's keys equal to the query's, in one transaction.

    A second run changes nothing. The last of several rows with the same key counts. A wrong argument, a query that the
    source refuses or that would write there, a value that the table refuses and a table that does not fit raise
    PermanentError and leave the table unchanged; a source that does not answer raises Unavailable.
    """
    wanted = validated(Arguments, args)
    with Query(wanted.source, wanted.query, wanted.key if wanted.resume else (), context) as source:
        yield from csv_parts.load(context, wanted, source, source.columns, in_parts=wanted.resume)
