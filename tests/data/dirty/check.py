"""Loads the forty files and says, file by file, whether the table is the one that a person expects (expected.json).

In tests:    for name, verdict, text in check.outcomes(load, dsn): assert verdict == "right", f"{name}: {text}"
             load(path, table, args) loads one file into one table and raises with the product's message where it refuses.
By command:  python check.py DSN 'dataloader load {path} --table {table} --args {args}' [FILE ...]

Verdicts: right, wrong (loaded, but differs), refused (should have been loaded), loaded (should have been refused), half (refused, but rows are there),
unclear (refused, as it should be, but the message lacks something that a person needs).
"""

import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from decimal import Decimal, InvalidOperation
from pathlib import Path

import psycopg

HERE = Path(__file__).resolve().parent
NUMBERS = {"smallint", "integer", "bigint", "numeric", "real", "double precision"}
COLUMNS = "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"


def expected():
    """The forty, as they stand in expected.json."""
    return json.loads((HERE / "expected.json").read_text())


def plain(value, type_):
    """A value that can be compared: an exact decimal where the wanted type is a number's, else its JSON text."""
    if value is not None and re.split(r"[(|]", type_)[0] in NUMBERS:
        with contextlib.suppress(InvalidOperation):
            return Decimal(str(value))
    return json.dumps(value, sort_keys=True, default=float)


def table_differs(db, table, want):
    """The difference between the table and the wanted one; an empty text where they are equal."""
    types = dict(db.execute(COLUMNS, (table,)))
    if set(types) != set(want["columns"]):
        return f"columns {list(types)}, wanted {list(want['columns'])}"
    bad = [
        f"{c} is {types[c]}, wanted {t}"
        for c, t in want["columns"].items()
        if not {types[c], types[c].split("(")[0]} & set(t.split("|"))
    ]
    found = [json.loads(row, parse_float=Decimal) for (row,) in db.execute(f"SELECT to_jsonb(t)::text FROM {table} t")]
    got = Counter(tuple(plain(row[c], t) for c, t in want["columns"].items()) for row in found)
    need = Counter(tuple(plain(v, t) for t, v in zip(want["columns"].values(), row)) for row in want["rows"])
    show = lambda counter: "; ".join("(" + ", ".join(str(v) for v in row) + ")" for row in list(counter)[:2])
    if got != need:
        bad.append(
            f"{got.total()} rows, wanted {need.total()}; not wanted: {show(got - need)}; missing: {show(need - got)}"
        )
    if want.get("rejected"):
        column = next((c for c, _ in db.execute(COLUMNS, (f"{table}_rejects",)) if "line" in c), None)
        lines = (
            sorted(int(line) for (line,) in db.execute(f'SELECT "{column}" FROM {table}_rejects')) if column else None
        )
        if lines != want["rejected"]:
            bad.append(f"rejected lines {lines}, wanted {want['rejected']}")
    return "; ".join(bad)


def message_lacks(message, want, file):
    """The facts that a refusal's message lacks: the file, the line, the column, the kind of value, the remedy."""
    lacks = [] if file in message else [f"the file {file}"]
    rest = message.replace(file, "")
    if want["lines"] and not any(re.search(rf"(lines?|rows?)\W{{1,3}}{n}\b|:{n}\b", rest, re.I) for n in want["lines"]):
        lacks.append(f"line {want['lines'][0]}")
    if want["column"] and not re.search(rf"(?<!\w){re.escape(want['column'])}(?!\w)", rest):
        lacks.append(f"the column {want['column']}")
    lacks += [f"{what} ({want[what]})" for what in ("kind", "remedy") if not re.search(want[what], rest, re.I)]
    return ", ".join(lacks)


def one(load, db, entry, files):
    """One file: its verdict and a text that says why."""
    table = "dirty_" + re.sub(r"\W", "_", entry["file"])
    prepare = ["DROP TABLE IF EXISTS {table}, {table}_rejects", *entry.get("before", ())]
    db.execute(";".join(prepare).format(table=table))
    path = str(Path(files) / entry.get("path", entry["file"]))
    for step in filter(None, (entry, entry.get("then"))):
        try:
            load(path, table, dict(step["args"]))
        except Exception as e:
            if "refused" not in step:
                return "refused", f"{json.dumps(step['args'], ensure_ascii=False)}: {' '.join(str(e).split())[:300]}"
            if (
                db.execute("SELECT to_regclass(%s)", (table,)).fetchone()[0]
                and db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            ):
                return "half", "it was refused, but rows are in the table"
            if lacks := message_lacks(str(e), step["refused"], entry["file"]):
                return "unclear", f"lacks {lacks}: {' '.join(str(e).split())[:300]}"
            db.execute(f"DROP TABLE IF EXISTS {table}, {table}_rejects")
        else:
            if "refused" in step:
                return "loaded", "should be refused: " + entry["why"]
            if bad := table_differs(db, table, step):
                return "wrong", bad
    return "right", ""


def outcomes(load, dsn, only=(), files=HERE / "files"):
    """Yields (file, verdict, text) for each file, or for those of `only`."""
    with psycopg.connect(
        dsn,
        autocommit=True,
        options="-c timezone=UTC -c datestyle=ISO -c intervalstyle=postgres -c client_min_messages=warning",
    ) as db:
        for entry in (e for e in expected() if not only or e["file"] in only):
            yield (entry["file"], *one(load, db, entry, files))


def by_command(template):
    """A loader that runs a command: {path}, {table} and {args} (as JSON) are filled in; an exit status other than 0 is a refusal."""

    def load(path, table, args):
        words = [
            w.format(path=path, table=table, args=json.dumps(args, ensure_ascii=False)) for w in shlex.split(template)
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stderr + done.stdout)

    return load


if __name__ == "__main__":
    failed = False
    for name, verdict, text in outcomes(by_command(sys.argv[2]), sys.argv[1], sys.argv[3:]):
        print(f"{verdict:8} {name}  {text}")
        failed |= verdict != "right"
    sys.exit(failed)
