"""`run.dask`, `run.ray`, `run.spark`: a program on a cluster that is there already. docs/engines.md is the page.

follow      order or adopt → follow → end, for every engine; the states of a program, its output
on_dask     a Dask scheduler, by its client; driver.py is what runs on the Dask worker
on_ray      Ray's job submission, by HTTP
on_spark    the REST server of a Spark master, by HTTP
rest        HTTP with JSON, for the latter two
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dataloader import config
from dataloader.pipelines import Context, PermanentError, Progress, absent, register, validated
from dataloader.pipelines.engines.follow import ARGS_MOST, Engine, Followed, Lines

Steps = Generator[Progress | None, None, Any]


class Arguments(BaseModel):
    """The `args` of the three tasks; docs/engines.md explains each."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    cluster: str = Field(min_length=1, max_length=64)
    entrypoint: str = Field(min_length=1, max_length=64)
    args: dict[str, Any] = {}


def run_dask(args: dict[str, Any], context: Context) -> Steps:
    """Call a function on a Dask cluster, and return what it returns.

    Cluster and function are those that DL_ENGINES allows; what it does not name raises PermanentError. A worker's death
    and a drain leave the function running: the next run of the job goes on with it. A cancellation and the time limit
    stop it. Its output is logged. A function that raises, or that the cluster loses, raises ProgramFailed; a cluster
    that is away for too long EngineAway.
    """
    from dataloader.pipelines.engines.on_dask import OnDask

    return (yield from _followed("dask", OnDask, args, context))


def run_ray(args: dict[str, Any], context: Context) -> Steps:
    """Run a command as a job of a Ray cluster, and return the result that it has printed; else as `run.dask`."""
    from dataloader.pipelines.engines.on_ray import OnRay

    return (yield from _followed("ray", OnRay, args, context))


def run_spark(args: dict[str, Any], context: Context) -> Steps:
    """Run an application on a Spark cluster, and return the result that it has printed; else as `run.dask`."""
    from dataloader.pipelines.engines.on_spark import OnSpark

    return (yield from _followed("spark", OnSpark, args, context))


def _followed(kind: str, engine: Callable[[Any, Any, str], Engine], args: dict[str, Any], context: Context) -> Steps:
    """Follow the program that the args name, on a cluster of this kind."""
    wanted = validated(Arguments, args)
    clusters = {name: each for name, each in config.load().dl_engines.items() if each.engine == kind}
    cluster = _named(clusters, wanted.cluster, f"cluster: should be one of {kind} that DL_ENGINES of this worker names")
    where = f"entrypoint: should be one that DL_ENGINES names for {wanted.cluster}"
    entry = _named(cluster.entrypoints, wanted.entrypoint, where)
    text = json.dumps(wanted.args)
    if len(text) > ARGS_MOST:
        raise PermanentError(f"args: should be at most {ARGS_MOST} bytes of JSON, not {len(text)}")
    lines = Lines(context.logger, cluster.output_kb * 1024)
    followed = Followed(engine(cluster, entry, text), wanted.cluster, cluster.away_sec, context, lines)
    return (yield from followed.steps())


def _named(known: dict[str, Any], name: str, should: str) -> Any:
    if name not in known:
        raise PermanentError(f"{should} ({', '.join(sorted(known)) or 'none'})")
    return known[name]


register("run.ray")(run_ray)
register("run.spark")(run_spark)
if find_spec("distributed"):
    register("run.dask")(run_dask)
else:
    absent("run.dask", "it needs distributed: pip install 'dataloader-farm[dask]'")
