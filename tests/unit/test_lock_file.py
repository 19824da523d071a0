"""deploy/requirements.lock: the libraries that setup.cfg asks for, no others, each by its version and hashes."""

from __future__ import annotations

import configparser
import re
from importlib.metadata import requires
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "deploy" / "requirements.lock").read_text()
ENTRIES = re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)(?: ;[^\\\n]*)?( ?\\\n +--hash=sha256:)?", LOCK, re.MULTILINE)
PINNED = {canonicalize_name(name): version for name, version, _ in ENTRIES}


def asked_for() -> list[Requirement]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return [Requirement(line) for line in setup["options"]["install_requires"].split("\n") if line]


def needed(requirement: Requirement, found: dict[str, Requirement]) -> dict[str, Requirement]:
    """The requirement and all that it needs here, as the installed distributions say."""
    key = f"{canonicalize_name(requirement.name)}[{','.join(sorted(requirement.extras))}]"
    if key not in found:
        found[key] = requirement
        for line in requires(requirement.name) or []:
            further = Requirement(line)
            environments = [{**default_environment(), "extra": extra} for extra in ("", *requirement.extras)]
            if not further.marker or any(further.marker.evaluate(environment) for environment in environments):
                needed(further, found)
    return found


def test_the_lock_fits_setup_cfg() -> None:
    """`python tools/lock.py` makes it anew."""
    wrong = [
        str(each)
        for each in asked_for()
        if not each.specifier.contains(PINNED.get(canonicalize_name(each.name), "0.dev0"), prereleases=False)
    ]
    assert not wrong


def test_the_lock_names_every_library_and_no_other() -> None:
    found: dict[str, Requirement] = {}
    for each in asked_for():
        needed(each, found)
    names = {canonicalize_name(each.name) for each in found.values()}
    assert names - set(PINNED) == set()
    # A line with a marker may be for another platform or Python.
    everywhere = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+).*==\S+ \\$", LOCK, re.MULTILINE)}
    assert everywhere - names == set()


def test_every_version_has_hashes() -> None:
    assert len(ENTRIES) == len(re.findall(r"^\w", LOCK, re.MULTILINE)) > 20
    assert [name for name, _, hashes in ENTRIES if not hashes] == []
