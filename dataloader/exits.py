"""The exit statuses of all programs; docs/cli.md explains them."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_FENCED = 70  # a worker left because its lease ran out and its pipeline would not stop
EXIT_RECYCLE = 75  # a worker asks to be replaced
EXIT_CANNOT_START = 78  # configuration, schema or pipelines are wrong: trying again does not help
