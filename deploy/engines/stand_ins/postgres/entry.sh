#!/bin/bash
# As the vendor's entry point: own the folder, drop root, make a new cluster once and run what prepares it, then serve.
set -euo pipefail
if [ "$(id -u)" = 0 ]; then
  mkdir -p "$PGDATA"
  chown -R postgres: /var/lib/postgresql
  chmod 700 "$PGDATA"
  exec setpriv --reuid postgres --regid postgres --init-groups "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb --encoding=UTF8 --locale=C.UTF-8 --username=postgres --auth=trust --pwfile="$POSTGRES_PASSWORD_FILE" > /dev/null
  pg_ctl --wait --options="-c listen_addresses='' -c unix_socket_directories=/run/postgresql" start > /dev/null
  export PGHOST=/run/postgresql PGUSER=postgres
  psql --quiet --command="CREATE DATABASE $POSTGRES_DB"
  for file in /docker-entrypoint-initdb.d/*; do
    case $file in
      *.sql) psql --quiet --set=ON_ERROR_STOP=1 --dbname="$POSTGRES_DB" --file="$file" ;;
      *.sh) bash "$file" ;;
    esac
  done
  unset PGHOST PGUSER
  pg_ctl --mode=fast --wait stop > /dev/null
fi
exec "$@" -c listen_addresses='*' -c unix_socket_directories=/run/postgresql
