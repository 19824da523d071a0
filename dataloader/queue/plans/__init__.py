"""Jobs that nobody triggers one by one: schedules and backfills, which the reaper makes jobs of."""
