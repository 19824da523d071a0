"""A farm under faults, and whether its promises held: `python -m tests.chaos --seconds 60 --seed 7`.

From its own server to the verdict, each module importing only those below it:

    __main__     the run: world, load and nemesis for so many seconds, the drain, the verdict
    nemesis      the faults, from one seeded random generator
    load         the jobs, triggered and cancelled over HTTP, and what the API answered
    world        the server and the programs as real processes, restarted when they die
    link         the way from a farm to the server, which can be cut
    gather       what the database says in the end
    checker      from the history to its violations; pure
    history      what is known of a run: plain values
    pipelines    what the jobs do, and the signs of life that they leave; run by the farms
"""

import sys
from pathlib import Path

# As pytest does for the tests beside it: the judge of journals is shared with them.
sys.path.append(str(Path(__file__).parents[1] / "process"))
