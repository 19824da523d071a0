"""Pipelines that test_canaries.py runs through DL_PIPELINES: they tell what they were given, and end in every way."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

from dataloader.pipelines import Context, PermanentError, Progress, register


def _alone(args: dict[str, Any]) -> Iterator[str]:
    """The secrets without the names that they were given under, as libraries quote them."""
    yield from (args[name] for name in ("password", "token", "api_key"))
    yield args["authorization"].split()[1]
    yield args["headers"]["X-Api-Key"]
    yield from (urlsplit(args[name]).password or "" for name in ("dsn", "source"))
    yield args["conninfo"].rpartition("=")[2]
    yield args["list"][0]["secret"]
    yield args["list"][1][0]["deep"]["client_secret"]
    yield args["tokens"][0]
    yield args["tokens"][1]["a"]
    yield args["auth"][1]


@register("tells_all")
def tells_all(args: dict[str, Any], context: Context) -> Generator[Progress, None, dict[str, Any]]:
    """Tell all args, as they are and each secret alone, to the log, stdout's logger, progress, result and error."""
    alone = " ".join(_alone(args))
    text = f"{args!r} or {alone}"
    context.logger.warning("given: %s", text, extra={"args_given": args})
    context.logger.info("said to nobody", extra={"headers": args["headers"], "note": text})
    print(f"printed: {text}")
    subprocess.run(["/bin/echo", f"a program says {text}"], check=True)
    print(args["headers"], alone, file=sys.stderr)
    yield {"processed": 1, "total": 2, "token": args["token"], "note": text, "args": args}
    if args["end"] == "spin":
        while True:
            yield {"processed": 1, "step": alone}
            time.sleep(0.01)
    if args["end"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if args["end"] == "exit":
        sys.exit(text)
    if args["end"] == "refuse":
        raise PermanentError(text)
    if args["end"] == "fail":
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(f"could not load: {text}", args) from error
    yield {"processed": 2, "total": 2, "note": alone}
    return {"note": alone, "args": [args]}
