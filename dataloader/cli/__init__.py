"""The command line: a command for each process, and what people need beside them.

`main` is the command `dataloader`, for programs too: `main(["migrate"])`.
"""

from dataloader.cli.main import main as main
