#!/bin/bash
# A login for each process, in its group of 1-roles.sql. Postgres's image runs it once, when the database is new.
set -euo pipefail

login() {  # name, group, secret
  PENSTOCK_LOGIN="$(cat "/run/secrets/$3")" psql -v ON_ERROR_STOP=1 -q -U postgres -d penstock -v name="$1" -v member="$2" <<'SQL'
\getenv password PENSTOCK_LOGIN
CREATE ROLE :"name" LOGIN PASSWORD :'password' IN ROLE :"member";
SQL
}

login penstock_migrate penstock_owner postgres_owner
login penstock_work penstock_worker postgres_worker
login penstock_analyse penstock_analysis postgres_analysis
login penstock_connect penstock_connectors postgres_connectors
login penstock_ask penstock_query postgres_query
login penstock_canary penstock_canaries postgres_canary
# What migrations create belongs to the group, and has the group's default privileges.
psql -v ON_ERROR_STOP=1 -q -U postgres -d penstock -c 'ALTER ROLE penstock_migrate SET role = penstock_owner'
