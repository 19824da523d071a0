-- outside a transaction
-- All rows have met the wider CHECK that 0006 has replaced. The look at them holds up no statement.
ALTER TABLE dl_jobs VALIDATE CONSTRAINT dl_jobs_chk_positive;
