#!/bin/bash
# Roles from /roles and a user in each. Repeating it is harmless: a changed password in .env takes effect.
set -euo pipefail

roles="${ROLES:-/roles}" secrets="${SECRETS:-/run/secrets}"
admin="elastic:$(cat "$secrets/elasticsearch_admin")"

put() {  # argument: path; the body on standard input, so that no password is on a command line
  curl --silent --show-error --fail --config <(printf 'user = "%s"\n' "$admin") --request PUT \
    --header 'content-type: application/json' --data-binary @- --output /dev/null "$ELASTICSEARCH/_security/$1"
}

user() {  # role, secret
  printf '{"password": "%s", "roles": ["%s"]}' "$(cat "$secrets/$2")" "$1" | put "user/$1"
}

for file in "$roles"/*.json; do
  put "role/$(basename "$file" .json)" < "$file"
done
user penstock_migrate elasticsearch_owner
user penstock_worker elasticsearch_worker
user penstock_query elasticsearch_query
