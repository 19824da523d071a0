"""Measurements of a farm beside the bare limit of its database: `python -m bench` (see README.md).

The modules; each imports only those below it:

    __main__    the command: which figures, how often, where the results go
    figures     the table of all figures
    claim       one session without a worker: claims behind a backlog, and the writes of a job's life
    bare        the bare limit: pgbench, a LISTEN loop, a loop that burns CPU
    place       the database, its schemas, a folder, and the farm's programs
    pipelines   the farm's jobs, and the times that they note themselves
    results     lines, their statistics, and how they are shown
"""
