"""A farm under faults, and a check of its promises: `python -m tools.chaos --seconds 60 --seed 7`.

The modules; each imports only those below it:

    __main__     the run: world, load and nemesis for some time, the drain, the verdict
    nemesis      the faults, from one seeded random generator
    load         the jobs, triggered and canceled over HTTP, and the API's answers
    world        the server and the programs as real processes, restarted when they die
    link         the connection between a farm and the server, which the nemesis can cut
    gather       the database's part of the history
    checker      from the history to its violations; pure
    history      the facts of a run: plain values
    pipelines    the jobs' pipelines, run by the farms, and their signs of life
"""
