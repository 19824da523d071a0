"""deploy/requirements.lock, made from setup.cfg by `python tools/lock.py`: the image's libraries, each with its hashes.

For developers: it asks the package index for the newest versions that setup.cfg allows. A test compares the names and
bounds with setup.cfg.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "deploy" / "requirements.lock"
HEAD = "# Made from setup.cfg by `python tools/lock.py`: the libraries of the image, for Python 3.11 and newer.\n"
# For all platforms: the image's Python is Debian's, which is newer than the oldest that the project takes.
COMPILE = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11", "--generate-hashes"]


def main() -> None:
    """Write the lock file anew."""
    command = [sys.executable, "-m", *COMPILE, "--upgrade", "--no-header", "--no-annotate", "setup.cfg"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    LOCK.write_text(HEAD + done.stdout)


if __name__ == "__main__":
    main()
