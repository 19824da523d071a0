"""Compare `load.files` with `\\copy` and its primary key, in turns: python -m bench.loads [ROWS ROUNDS [CASE ...]]."""

from __future__ import annotations

import csv
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from pyarrow import csv as pa_csv
from pyarrow import parquet

from dataloader import embedded, pipelines, testing

TYPES = {
    **{"id": "bigint", "name": "text", "note": "text", "born": "date", "seen": "timestamptz"},
    **{"amount": "numeric(12,2)", "number": "integer", "share": "double precision", "empty": "text", "ok": "boolean"},
}
COLUMNS = ", ".join(f"{name} {kind}" for name, kind in TYPES.items())
CASES: dict[str, dict[str, Any]] = {
    **{"new": {}, "keyed": {}, "rejects": {"max_errors": 100, "path": "wrong.csv"}},
    **{"parquet": {"path": "rows.parquet"}, "parquet keyed": {"path": "rows.parquet"}},
    **{"words": {"null": ["", "x"]}, "lines": {"add": {"line": "line"}}},  # half of the rows have the word
    "json lines": {"path": "rows.jsonl"},
}


def rows(count: int) -> Iterator[list[Any]]:
    """The same rows each time: 1,000,000 of them are 156 MB."""
    chance = random.Random(1)
    for n in range(count):
        name = f'Müller, "{chance.choice("ABC")}" & Söhne {n}' if n % 3 else f"plain {n}"
        note = "first line\nsecond line" if n % 50 == 0 else f"Заметка {chance.random()}, with a comma"
        born = date(1950, 1, 1) + timedelta(chance.randrange(25_000))
        seen = f"2026-{n % 12 + 1:02}-{n % 28 + 1:02} 12:{n % 60:02}:{n % 60:02}+00"
        amount, share = f"{chance.randrange(10**8) / 100:.2f}", f"{chance.random():.15f}"
        yield [n, name, note, born, seen, amount, n % 30_000, share, ("", "x")[n % 2], "tf"[n % 2]]


def write_parquet(path: Path) -> None:
    """The rows of the CSV file with their types."""
    kinds = [pa.int64(), pa.string(), pa.string(), pa.date32(), pa.timestamp("us", "UTC"), pa.decimal128(12, 2)]
    kinds += [pa.int32(), pa.float64(), pa.string(), pa.bool_()]
    convert = pa_csv.ConvertOptions(
        column_types=dict(zip(TYPES, kinds, strict=True)),
        **{"true_values": ["t"], "false_values": ["f"], "null_values": [""], "strings_can_be_null": True},
    )
    table = pa_csv.read_csv(path, parse_options=pa_csv.ParseOptions(newlines_in_values=True), convert_options=convert)
    parquet.write_table(table, path.with_suffix(".parquet"), compression="zstd")


def write_json(path: Path) -> None:
    """The rows of the CSV file as objects, a line each."""
    with path.open(encoding="utf-8", newline="") as file, path.with_suffix(".jsonl").open("w", encoding="utf-8") as to:
        for row in csv.DictReader(file):
            numbers = "".join(f'"{name}": {row.pop(name)}, ' for name in ("id", "amount", "number", "share"))
            texts = {name: text or None for name, text in row.items()} | {"ok": row["ok"] == "t"}
            to.write(f"{{{numbers}{json.dumps(texts, ensure_ascii=False)[1:]}\n")


def by_copy(conn: psycopg.Connection[Any], path: Path, case: str) -> None:
    """Load as people do it by hand."""
    if "keyed" not in case:
        conn.execute(f"CREATE TABLE t ({COLUMNS})".encode())
    with path.open("rb") as file, conn.cursor().copy("COPY t FROM STDIN (FORMAT csv, HEADER)") as copy:
        while data := file.read(2**16):
            copy.write(data)
    if "keyed" not in case:
        conn.execute("ALTER TABLE t ADD PRIMARY KEY (id)")


def seconds(dsn: str, folder: Path, case: str, is_ours: int) -> float:
    """How long one load takes."""
    pipelines.load([])
    with psycopg.connect(dsn) as conn:
        conn.execute("DROP TABLE IF EXISTS t, t_rejects")
        conn.execute(f"CREATE TABLE t ({COLUMNS}, PRIMARY KEY (id))".encode() if "keyed" in case else b"SELECT")
        conn.commit()
        began = time.monotonic()
        if is_ours:
            args = {"path": "rows.csv", "table": "t", "key": ["id"]} | CASES[case]
            task = "load.parquet" if "parquet" in case else "load.files"
            args |= {} if "parquet" in case else {"types": TYPES}
            result = testing.run(task, args, dsn=dsn, data_dir=folder)
            assert result.status == "succeeded", result.error
        else:
            by_copy(conn, folder / "rows.csv", case)
            conn.commit()
        return time.monotonic() - began


if __name__ == "__main__":
    count, rounds, *cases = sys.argv[1:] or ("1000000", "3")
    with tempfile.TemporaryDirectory(prefix="dl_loads_") as root:
        Path(root).chmod(0o711)  # for the user who runs PostgreSQL
        for name, more in {"rows.csv": 0, "wrong.csv": 100}.items():
            with Path(root, name).open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([TYPES, *rows(int(count)), *[["x"] * 10] * more])
        write_parquet(Path(root, "rows.csv"))
        write_json(Path(root, "rows.csv"))
        with embedded.Server.start(Path(root, "server"), {"max_wal_size": "4GB"}) as server:
            for case in cases or CASES:
                pairs = [[seconds(server.dsn, Path(root), case, who) for who in (0, 1)] for _ in range(int(rounds))]
                theirs, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
                print(f"{case:13} {ours:6.2f} s, copy {theirs:6.2f} s: {ours / theirs:.2f}", flush=True)
