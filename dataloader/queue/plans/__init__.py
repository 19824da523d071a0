"""Schedules and backfills, from which the reaper makes jobs."""
