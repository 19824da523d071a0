"""Do the tests bite? Each guard of the SQL is taken away in a copy, one at a time, and some test must go red."""
