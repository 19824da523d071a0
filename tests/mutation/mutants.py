"""The guards of the SQL, and how each is taken away: the table in mutants.txt.

Below the heading of a place (a text that begins the statement, function or trigger; it occurs once) each line names a
mistake, the old text (once in that place) and the new one. A mistake that no test can find says why behind `#`: then no
test must fail, and when one does the reason is wrong. The place of a statement has its file before it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SCHEMA = [*sorted((ROOT / "sql" / "functions").glob("*.sql")), ROOT / "sql" / "schema.sql"]  # calls after bodies
_BEGIN = re.compile(r"^ *(-- name: |CREATE )", re.MULTILINE)
_LINE = re.compile(r'(?P<name>.+?): (?P<old>"(?:[^"\\]|\\.)*") -> (?P<new>"(?:[^"\\]|\\.)*")(?:  # (?P<why>.+))?')


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard, and the SQL without it."""

    file: str
    place: str
    name: str
    old: str
    new: str = ""
    equivalent: str | None = None

    def __str__(self) -> str:
        words = self.place.split("(")[0].removesuffix(" BEFORE").removesuffix(" AFTER").split()
        return f"{words[-1]}: {self.name}"


class Gone(Exception):
    """The SQL has changed, and the list has not."""


def mutated(text: str, mutant: Mutant) -> str:
    """The file's text with this guard taken away; raises Gone unless it is there exactly once."""
    if text.count(mutant.place) != 1:
        raise Gone(f"{mutant.file}: {mutant.place!r} is not there any more, or not once")
    start = text.index(mutant.place)
    following = _BEGIN.search(text, start + len(mutant.place))
    end = following.start() if following else len(text)
    if text.count(mutant.old, start, end) != 1:
        raise Gone(f"{mutant}: this guard is not there any more, or not once: {mutant.old!r}")
    return text[:start] + text[start:end].replace(mutant.old, mutant.new) + text[end:]


def apply(folder: Path, mutant: Mutant) -> None:
    """Take the guard away in this copy of the sql folder."""
    path = folder / mutant.file
    path.write_text(mutated(path.read_text("utf-8"), mutant), "utf-8")


def _read(table: str) -> Iterator[Mutant]:
    texts = {str(path.relative_to(ROOT / "sql")): path.read_text("utf-8") for path in SCHEMA}
    file = place = ""
    for line in filter(None, table.splitlines()):
        if line.startswith("## "):
            named, _, statement = line[3:].partition(" -- name: ")
            place = f"-- name: {statement}\n" if statement else json.loads(f'"{named}"')
            file = named if statement else next((name for name, text in texts.items() if place in text), "schema.sql")
        elif found := _LINE.fullmatch(line):
            yield Mutant(file, place, found["name"], json.loads(found["old"]), json.loads(found["new"]), found["why"])
        else:
            raise ValueError(f"mutants.txt: not a mutant: {line}")


MUTANTS = list(_read(Path(__file__).with_name("mutants.txt").read_text("utf-8")))
