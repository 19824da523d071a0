"""PROCESS: `dataloader bench` measures a farm beside the bare limit of its database, in one run, interleaved.

Whatever it makes lies in schemas and folders of its own, and is removed at the end. May import anything below the
command line, and psycopg itself: a bare limit goes around our connections. Its modules, each of which imports only
those below it:

    program     which figures are measured, where, and what is said of them
    drain keys claim latency handover cpu enqueue idle memory    a figure each: `measure(place)` yields its lines
    farm        real programs: workers and the API, on the bench's schema
    bare        PROCESS the bare counterparts: a LISTEN loop, a loop that burns CPU
    pgbench     pgbench on the contract's tables
    place       where it happens: the schemas, the folder, how much and how often
    pipelines   what the farm's jobs do
    marks       when a job began and ended, told by the job itself
    report      lines as a table and as JSON
    line        PURE a line of the result and the statistics in it
    plot        results as SVG; a program of its own
"""
