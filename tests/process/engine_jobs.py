"""The work of clusters: functions for Dask, commands of Ray (`python -m engine_jobs`). Each notes its starts."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def counts(args: dict[str, Any]) -> dict[str, Any]:
    """Count ten times a second for so many seconds, or until the file `go` exists, but once at least."""
    begun(args)
    until = time.monotonic() + args.get("sec", 600)
    number = 0
    while number == 0 or (time.monotonic() < until and not Path(args["starts"] + ".go").exists()):
        number += 1
        print(json.dumps({"processed": number, "total": 6000}), flush=True)
        print(f"counted {number}", flush=True)
        time.sleep(0.1)
    return {"counted": number > 0, "order": os.environ["DATALOADER_ORDER"]}


def fails(args: dict[str, Any]) -> None:
    begun(args)
    print("half way", flush=True)
    raise ValueError("bad luck")


def spreads(args: dict[str, Any]) -> int:
    """Add numbers up on the Dask cluster that it runs on."""
    from distributed import Client

    with Client() as client:
        return int(client.submit(sum, client.map(abs, range(-10, 0))).result())


def begun(args: dict[str, Any]) -> None:
    with Path(args["starts"]).open("a") as file:
        file.write(f"{os.getpid()}\n")


if __name__ == "__main__":
    value = globals()[sys.argv[1]](json.loads(os.environ["DATALOADER_ARGS"]))
    print(json.dumps({"result": value}), flush=True)
