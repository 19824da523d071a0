"""PROCESS: `dataloader bench` measures a farm beside the bare limit of its database, in one run, in turns.

`dataloader capacity` measures what a job costs, and says what the database bears.

A bench makes schemas and a folder of its own, and removes them at the end. A bare limit bypasses our connections, so
this room uses psycopg itself. The modules; each imports only those below it:

    curves      PROCESS a forecast as SVG and as a page
    forecast    the command `capacity`: its question, its output
    compared    the model's predictions beside runs
    costs       what the model needs, measured
    program     the command `bench`: its figures, its place, its output
    drain keys ordered fair claim affinity latency handover cpu enqueue idle memory
                a figure each: `measure(place)` yields its lines
    farm        real programs: workers and the API, on the bench's schema
    bare        PROCESS the bare counterparts: a LISTEN loop, a loop that burns CPU
    pgbench     pgbench on the contract's tables
    place       the database, the schemas, the folder, sizes and rounds
    pipelines   the farm's jobs
    marks       the begin and the end of a job, noted by the job itself
    report      lines as a table and as JSON
    sheets      PURE a forecast as JSON and as sheets
    server_cpu  the CPU time of the server's processes, and of a farm's
    capacity    PURE what one primary bears, from measured costs
    simulation  PURE the same, event by event, to check its law
    line        PURE a line of the result, and its statistics
    plot        PROCESS results as SVG
"""
