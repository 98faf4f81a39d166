#!/bin/bash
# As the vendor's entry point: variables with a dot are settings, and the password is put into the key store.
set -euo pipefail
printf %s "$ELASTIC_PASSWORD" | bin/elasticsearch-keystore add --force --stdin bootstrap.password > /dev/null
settings=(-Enetwork.host=0.0.0.0)
while IFS= read -r -d '' variable; do
  if [[ ${variable%%=*} == *.* ]]; then settings+=("-E$variable"); fi
done < /proc/self/environ
exec bin/elasticsearch "${settings[@]}"
