#!/bin/sh
# The database with its two ordinary roles. The image of PostgreSQL runs this once, when its volume is empty.
# The owner of the queue is no superuser: some functions of the queue run with the owner's rights.
set -eu
export SECRETS_DIR="${SECRETS_DIR:-/run/secrets}"

# psql reads the passwords itself: every user of a machine can see a program's arguments.
psql -v ON_ERROR_STOP=1 --no-psqlrc --username "${POSTGRES_USER:-postgres}" --dbname postgres <<'SQL'
\set owner `cat "$SECRETS_DIR/owner"`
\set farm `cat "$SECRETS_DIR/farm"`
CREATE ROLE dl_owner LOGIN PASSWORD :'owner';
CREATE ROLE dl_farm LOGIN PASSWORD :'farm';
CREATE DATABASE dataloader OWNER dl_owner;
REVOKE CONNECT ON DATABASE dataloader FROM PUBLIC;
GRANT CONNECT, TEMPORARY ON DATABASE dataloader TO dl_farm;
\connect dataloader
-- The queue is the owner's; pipelines write into the other schema.
CREATE SCHEMA queue AUTHORIZATION dl_owner;
CREATE SCHEMA data AUTHORIZATION dl_farm;
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
SQL
