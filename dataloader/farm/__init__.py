"""The processes of one machine: supervisor, workers, keeper, reaper, and what they share."""
