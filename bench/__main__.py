"""Measure a farm beside its database's bare limit, in schemas that are dropped at the end: see bench/README.md."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import psycopg

from bench.figures import FIGURES
from bench.place import BenchError, placed
from bench.results import Line, document, markdown
from dataloader import config, embedded, log
from dataloader.queue import migrations
from tools.programs import NotReady

INTERRUPTED = 130


def main() -> int:
    """Measure, print and store what was measured, also after Ctrl-C and SIGTERM; returns the exit status."""
    given = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = config.Settings(**{"dl_db_dsn": given.dsn} if given.dsn else {})
    lines, about, status = list[Line](), "", 0
    try:
        with placed(settings, rounds=given.rounds, scale=given.scale) as place:
            about = place.about()
            for name in given.figures or FIGURES:
                for line in FIGURES[name](place):
                    lines.append(line)
                    print(*line.cells(), sep="  ", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        status = INTERRUPTED
        print("bench: interrupted", file=sys.stderr)
    except (BenchError, NotReady, embedded.EmbeddedError, migrations.SchemaError, psycopg.Error, OSError) as error:
        status = 1
        print(f"bench: {log.masked(str(error).strip())}", file=sys.stderr)
    if lines:
        print(about, "", markdown(lines), sep="\n")
        if given.json:
            given.json.write_text(document(lines, about), "utf-8")
    return status


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"default: all: {', '.join(FIGURES)}")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured; medians are shown (5)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all sizes (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines with all samples")
    parser.add_argument("--dsn", help="a database; default: the configured one, or an embedded PostgreSQL")
    given = parser.parse_args()
    if unknown := set(given.figures) - set(FIGURES):
        parser.error(f"there is no figure {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    if given.rounds < 1 or not 0 < given.scale <= 100:
        parser.error("--rounds should be at least 1, and --scale above 0 and at most 100")
    return given


if __name__ == "__main__":
    sys.exit(main())
