-- Functions of earlier versions that only other functions called.
DROP FUNCTION IF EXISTS
  dl_concerned(uuid[]), dl_tell(uuid[], uuid[]), dl_stepped(dl_jobs, dl_jobs), dl_resolve_freed(), dl_crash_delay(int),
  dl_spend_tokens(uuid[]), dl_let_in_some(text, text, int), dl_let_in_later(text, text, timestamptz), dl_far(),
  dl_merge_slots(smallint[], int[], smallint[], int[]),
  dl_resolve(uuid[]);
