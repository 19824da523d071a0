"""`python -m dataloader` is the `dataloader` command."""

from dataloader.cli.main import main

if __name__ == "__main__":
    main(prog_name="dataloader")
