"""Jobs: what is known of one, and what operators do to it."""

from __future__ import annotations

from dataloader.model.jobs import JobPrediction
from dataloader.ops.errors import Unknown
from dataloader.ops.op import Call, made, op
from dataloader.ops.types import JobId
from dataloader.queue.reports import predictions


@op("GET /jobs/{job_id}/prediction", errors=(404,))
def predict(call: Call, job_id: JobId) -> JobPrediction:
    """When a job will end, the range of that, and how right such predictions were in its queue."""
    job = predictions.job(call.conn, job_id)
    if job is None:
        raise Unknown("job")
    return made(JobPrediction, predictions.of_job(call.outlook(call.conn, job["queue"]), job))
