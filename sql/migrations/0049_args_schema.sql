-- The JSON Schema of a task's args, for the API and the pages, which do not import pipelines.
-- oldest code: 1

-- By their length: a text of this size is checked, and made into a form, in little time.
ALTER TABLE dl_tasks ADD COLUMN IF NOT EXISTS args_schema text
  CONSTRAINT dl_tasks_chk_args_schema CHECK (octet_length(args_schema) <= 65536);
COMMENT ON COLUMN dl_tasks.args_schema IS 'the JSON Schema of the args, by the pipeline''s model; null: any object will do';
