"""The processes of one machine: supervisor, workers, keeper, reaper, and the modules that they share."""
