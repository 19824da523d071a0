"""The pages about runs: of all tasks, of one task, of the workers in time; and what happened lately."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flask import Response, request

from dataloader.api.dashboard import charts
from dataloader.api.dashboard.pages import asked_range, blueprint, lately, runs_of
from dataloader.api.dashboard.render import named_queue, show
from dataloader.api.web.endpoint import named, session
from dataloader.api.web.problems import Problem
from dataloader.queue.reports import activity as of_activity
from dataloader.queue.reports import runs, stats
from dataloader.queue.reports import timeline as of_timeline

LATEST = 10  # jobs of a task on its page
LATEST_SCAN = 3_000  # jobs that the search for them reads
LISTED = 100  # runs of the timeline's table


@blueprint.get("/tasks")
def tasks() -> Response:
    """All tasks with their figures; the address holds the range and the filter."""
    range_, like = asked_range(), request.args.get("like", "")
    if "\0" in like:
        raise Problem(400, "A filter should have no NUL character in it.")
    page = lately(runs.listed, range_, like)
    return show("tasks.html", found=page, like=like, ranges=list(runs.RANGES))


@blueprint.get("/tasks/<anything:task>")
def task(task: str) -> Response:
    """One task: its figures, charts, queues and last jobs."""
    task = named("task", named_queue(task))
    figures = runs_of(runs.task_runs, task)
    with session() as conn:
        page = stats.jobs(conn, stats.Wanted(task=task), LATEST, scan=LATEST_SCAN)
    return show("task.html", name=task, jobs=page.jobs, is_cut=page.next is not None, **figures)


@blueprint.get("/timeline")
def timeline() -> Response:
    """Which worker ran what when, in the last hours."""
    text = request.args.get("hours", str(of_timeline.HOURS[0]))
    if text not in map(str, of_timeline.HOURS):
        raise Problem(400, f"The hours should be one of: {', '.join(map(str, of_timeline.HOURS))}.")
    report = lately(of_timeline.read, int(text))
    shown = charts.lanes(report.runs, report.since, report.until)
    return show(
        "timeline.html",
        found=asdict(report) | {"runs": []},
        runs=[run._asdict() for run in report.runs[: -LISTED - 1 : -1]],
        lanes=[_lane(lane) for lane in shown],
        more_workers=len({run.worker for run in report.runs}) - len(shown),
        hours=int(text),
        choices=of_timeline.HOURS,
        height=max(len(shown), 1) * (charts.LANE + charts.GAP),
        width=charts.WIDTH,
    )


def _lane(lane: charts.Lane) -> dict[str, Any]:
    rectangles = [each._asdict() | {"row": each.row | {"run": each.row["run"]._asdict()}} for each in lane.rectangles]
    return {"worker": lane.worker, "runs": lane.runs, "busy": lane.busy, "rectangles": rectangles}


@blueprint.get("/activity")
def activity() -> Response:
    """The page lists dead jobs, recoveries, operators' changes and starts of farms, of all hosts."""
    entries = lately(of_activity.read)
    return show("activity.html", entries=entries, kinds=of_activity.KINDS)
