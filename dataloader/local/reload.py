"""`dataloader up --reload`: changed files of the users' modules bring new workers, when the check finds no error."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dataloader.farm.process import now
from dataloader.local.parts import Part, say, warn

LOOK_SEC = 0.5  # between two looks at the files
SETTLED_SEC = 0.2  # an editor may write a file in several steps
NAMED_MOST = 3  # changed files that the message names
Stamps = dict[str, tuple[int, int, int] | None]


class Reload:
    """The files of the users' modules as they were at the last check, and what a change does."""

    def __init__(self, files: Iterable[str], check: Callable[[], dict[str, Any] | None], parts: Sequence[Part]) -> None:
        """`check` imports the modules anew and returns the report of `dataloader check`, None where there is none.

        `parts` are the programs that get SIGHUP after a change without an error.
        """
        self._check, self._parts = check, parts
        self._stamps = stamps(files)
        self._look_at = 0.0

    def look(self) -> None:
        """Look at the files when that is due; after a change check them, and reload the programs."""
        if now() < self._look_at:
            return
        self._look_at = now() + LOOK_SEC
        changed = [name for name, stamp in stamps(self._stamps).items() if stamp != self._stamps[name]]
        if changed and all(map(_has_settled, changed)):
            self._reload(changed)

    def _reload(self, changed: Sequence[str]) -> None:
        before = self._stamps = stamps(self._stamps)
        report = self._check()
        if report is None:
            return
        found = stamps(report["files"])
        errors = [finding for finding in report["findings"] if finding["level"] == "error"]
        # After an error the modules behind it were not imported: those of before and their neighbours are watched too.
        # A file that was changed during the check keeps its older stamp, so the next look finds the change.
        self._stamps = (stamps(neighbours(before)) | found | before) if errors else found | _still(before, found)
        named = ", ".join(Path(name).name for name in changed[:NAMED_MOST])
        what = named if len(changed) <= NAMED_MOST else f"{named} and {len(changed) - NAMED_MOST} more files"
        if errors:
            for finding in errors:
                warn(f"{what} changed, and the workers go on with the code of before: {finding['what']}")
            return
        say(f"dataloader up: {what} changed: new workers start with the new code")
        for part in self._parts:
            if part.process and part.process.poll() is None:
                part.process.send_signal(signal.SIGHUP)


def stamps(files: Iterable[str]) -> Stamps:
    """What tells a file from an earlier one of its name; None where there is none."""
    return {name: _stamp(name) for name in files}


def neighbours(files: Iterable[str]) -> set[str]:
    """The Python files in the folders of these files."""
    return {str(path) for folder in {Path(name).parent for name in files} for path in folder.glob("*.py")}


def _still(before: Stamps, found: Stamps) -> Stamps:
    return {name: stamp for name, stamp in before.items() if name in found}


def _stamp(name: str) -> tuple[int, int, int] | None:
    with suppress(OSError):
        found = os.stat(name)
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None


def _has_settled(name: str) -> bool:
    """Whether the last write to the file was some time ago; a clock that was set back does not hold it up."""
    with suppress(OSError):
        return not 0 <= time.time() - os.stat(name).st_mtime < SETTLED_SEC
    return True
