"""docs/tutorial.md, command by command as it is pasted: `python3 -m tools.tutorial`, in a checkout, on a fresh machine.

The program types each ```sh block into a terminal, a bash in a pseudo-terminal. The terminal's output has to contain
each ```text block that follows: its lines in their order, with … for any text. A comment before a block repeats an
instruction of the text: `<!-- terminal 2 -->`, `<!-- exit 10 -->`; `<!-- terminal 2: Ctrl-C -->` stands alone. Every
address of this machine in the text has to answer 200. The program uses only the standard library, since a fresh
machine has nothing else.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import signal
import sys
import tempfile
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATIENCE = 300.0  # seconds for each block; one of them installs packages
SHELL = ["/bin/bash", "--norc", "--noprofile", "--noediting", "-i"]
_PIECE = re.compile(
    r"^<!-- (?P<mark>[^>]*) -->$|^```(?P<kind>\w*)\n(?P<block>.*?)^```$|<(?P<url>http://127\.0\.0\.1[^>\s]*)>",
    re.MULTILINE | re.DOTALL,
)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>()][A-Z0-9]?|\r")


class Failed(Exception):
    """The result differs from the tutorial's promise."""


@dataclass
class Step:
    """A block of commands, or a key, with its promised result."""

    commands: str
    terminal: str = "1"
    exit_status: int = 0
    expected: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)


def steps(text: str) -> Iterator[Step]:
    """The tutorial's instructions, in order."""
    marks: list[str] = []
    step: Step | None = None
    for piece in _PIECE.finditer(text):
        if piece["mark"]:
            if piece["mark"].endswith(": Ctrl-C"):
                yield from [step] if step else []
                step = Step("\x03", piece["mark"].split()[1].rstrip(":"))
            else:
                marks.append(piece["mark"])
        elif piece["kind"] == "sh":
            yield from [step] if step else []
            given = dict(mark.split() for mark in marks)
            step, marks = Step(piece["block"], given.get("terminal", "1"), int(given.get("exit", 0))), []
        elif piece["kind"] == "text" and step:
            step.expected.append(piece["block"])
        elif piece["url"] and step:
            step.urls.append(piece["url"])
    yield from [step] if step else []


class Terminal:
    """A bash on a terminal, as for a person."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            # A program in the background ignores SIGINT, and its children inherit that.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(SHELL[0], SHELL, environment)
        self._news = threading.Condition()
        self._shown, self._is_closed = "", False
        self._reader = threading.Thread(target=self._show, daemon=True)
        self._reader.start()
        attributes = termios.tcgetattr(self._fd)
        attributes[3] &= ~termios.ECHO  # no echo of the typed commands
        termios.tcsetattr(self._fd, termios.TCSANOW, attributes)
        termios.tcsetwinsize(self._fd, (50, 160))
        self._type("PS1= PS2=; set +H")
        self.run("true", 10)

    def run(self, commands: str, patience: float) -> tuple[str, int]:
        """The output of the commands, and their exit status."""
        self._type(commands.rstrip("\n"))
        self._type('status=$?; echo; echo "[[ended]] $status"')
        shown = self.read(r"\[\[ended\]\] (\d+)\n", patience)
        *_, status = re.findall(r"\[\[ended\]\] (\d+)\n", shown)
        return shown.partition("[[ended]]")[0], int(status)

    def start(self, commands: str) -> None:
        """Type commands; the last of them keeps running."""
        self._type(commands.rstrip("\n"))

    def interrupt(self, patience: float) -> None:
        """Send Ctrl-C, and wait for a prompt."""
        os.write(self._fd, b"\x03")
        self.run("true", patience)

    def read(self, until: str, patience: float) -> str:
        """The output since the last call, as soon as it contains the expected text."""
        with self._news:
            if not self._news.wait_for(lambda: re.search(until, self._shown) or self._is_closed, patience):
                raise Failed(f"waited {patience:g} s for {until!r} after:\n{self._shown}")
            if self._is_closed:
                raise Failed(f"the terminal has closed after:\n{self._shown}")
            shown, self._shown = self._shown, ""
        return shown

    def _show(self) -> None:
        """Read without end: a full terminal blocks its writers, and a blocked writer ignores Ctrl-C."""
        rest = b""
        while data := self._received():
            whole, newline, rest = (rest + data).rpartition(b"\n")
            with self._news:
                self._shown += _ANSI.sub("", (whole + newline).decode(errors="replace"))
                self._news.notify()
        with self._news:
            self._is_closed = True
            self._news.notify()

    def _received(self) -> bytes:
        try:
            return os.read(self._fd, 65_536)
        except OSError:
            return b""

    def close(self) -> None:
        """Send Ctrl-C to all running commands, then close the terminal."""
        with suppress(OSError, Failed):
            self.interrupt(30)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._reader.join(10)
        os.close(self._fd)

    def _type(self, line: str) -> None:
        os.write(self._fd, line.encode() + b"\n")


def pattern(block: str) -> str:
    """A regular expression for the lines of a ```text block."""
    lines = [re.escape(" ".join(line.split())).replace("…", ".*") for line in block.strip().splitlines()]
    return r"(?s:.*?)".join(line.replace(r"\ ", r"\s+") for line in lines)


def do(step: Step, terminals: dict[str, Terminal], open_one: dict[str, str], folder: Path) -> None:
    """Do the step, and compare its result with its promise."""
    if step.terminal not in terminals:
        terminals[step.terminal] = Terminal(folder, open_one)
    terminal = terminals[step.terminal]
    if step.commands == "\x03":
        terminal.interrupt(60)
    elif step.terminal == "1":
        shown, status = terminal.run(step.commands, PATIENCE)
        print(shown.strip(), flush=True)
        if status != step.exit_status:
            raise Failed(f"exit status {status}, not {step.exit_status}")
        for block in step.expected:
            if not re.search(pattern(block), shown):
                raise Failed(f"this is not in it:\n{block}")
    else:
        terminal.start(step.commands)
        print(terminal.read("".join(map(pattern, step.expected)), PATIENCE).strip(), flush=True)
    for url in step.urls:
        with urllib.request.urlopen(url, timeout=10) as answer:
            print(f"--- {url}: {answer.status}", flush=True)


def environment(home: Path | None) -> dict[str, str]:
    """A person's environment; with another home if one is given, so that the real one stays untouched."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "USER", "LANG", "LOGNAME")}
    kept |= {name: value for name, value in os.environ.items() if name.upper().startswith(("PIP_", "HTTP", "NO_PROXY"))}
    kept |= {name: os.environ[name] for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE") if name in os.environ}
    if home:
        pip = Path.home() / ".config/pip/pip.conf"
        kept |= {"HOME": str(home), "DL_HOME": str(home / "home")} | (
            {"PIP_CONFIG_FILE": str(pip)} if pip.exists() else {}
        )
    return kept | {"TERM": "xterm", "LANG": "C.UTF-8", "VIRTUAL_ENV_DISABLE_PROMPT": "1"}


def walk(all_steps: Sequence[Step], given: dict[str, str], folder: Path) -> None:
    """Do the steps in terminals of this environment that start in `folder`; Failed says which step fails, and why."""
    terminals = dict[str, Terminal]()
    try:
        for number, step in enumerate(all_steps, start=1):
            said = "Ctrl-C" if step.commands == "\x03" else step.commands.rstrip()
            print(f"\n=== {number}, terminal {step.terminal}\n{said}\n---", flush=True)
            try:
                do(step, terminals, given, folder)
            except Failed as e:
                raise Failed(f"step {number}: {e}") from None
    finally:
        for terminal in terminals.values():
            terminal.close()


def main() -> int:
    """Do the whole tutorial; the exit status is 0 when it keeps its promises."""
    parser = argparse.ArgumentParser(prog="python3 -m tools.tutorial", description=__doc__)
    parser.add_argument("--at-home", action="store_true", help="in the real home: on a machine that is thrown away")
    parser.add_argument("--until", type=int, help="only so many steps")
    wish = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dl-tutorial-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # for root the database runs as another user
        given = environment(None if wish.at_home else Path(folder))
        all_steps = list(steps((ROOT / "docs/tutorial.md").read_text("utf-8")))[: wish.until]
        try:
            walk(all_steps, given, ROOT)
        except Failed as e:
            print(f"\nThe tutorial fails at {e}", file=sys.stderr)
            return 1
    print(f"\nThe tutorial works: {len(all_steps)} steps in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
