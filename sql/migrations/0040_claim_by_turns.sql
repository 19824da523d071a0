-- The claim reads jobs by their turns. The indexes of the claim by time of creation go with its functions.
-- oldest code: 1
-- functions: dl_by_lag, dl_most_wanted, dl_left_out, dl_take_keys, dl_step, dl_park, dl_unpark, dl_put_off, dl_give_turns, dl_wake, dl_settle_limits, dl_next_of_limit, dl_let_in_some

DROP INDEX IF EXISTS ix_dl_jobs_ready, ix_dl_jobs_key, ix_dl_jobs_limits;
