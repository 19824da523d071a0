"""The exit statuses of our programs, which docs/cli.md explains; and those of other programs in words."""

import signal

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_FENCED = 70  # a worker left because its lease ran out and its pipeline would not stop
EXIT_RECYCLE = 75  # a worker asks to be replaced
EXIT_CANNOT_START = 78  # configuration, schema or pipelines are wrong: trying again does not help


def outcome(code: int) -> str:
    """The end of a process in words, by its exit code or, where negative, its signal."""
    if code >= 0:
        return f"ended with status {code}"
    names = {each.value: each.name for each in signal.Signals}  # of the real-time signals only two have names
    return f"was ended by {names.get(-code, f'signal {-code}')}"
