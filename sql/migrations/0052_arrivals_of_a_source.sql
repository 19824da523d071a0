-- From which cluster a job has come: a cluster decides only on copies of its own jobs. Rows without a source are older.
-- oldest code: 1

ALTER TABLE dl_arrivals ADD COLUMN IF NOT EXISTS source text;
