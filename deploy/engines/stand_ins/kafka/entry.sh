#!/bin/bash
# As the vendor's entry point: take the mounted configuration, format a new folder once, then serve.
set -euo pipefail
cp /mnt/shared/config/* /opt/kafka/config/
read -ra heap <<< "${KAFKA_HEAP_OPTS:-}"
java=(/opt/java/bin/java "${heap[@]}" -XX:TieredStopAtLevel=1 -cp '/opt/kafka/libs/*')
properties=/opt/kafka/config/server.properties
if [ ! -e /var/lib/kafka/data/meta.properties ]; then
  cluster=$(head -c 16 /dev/urandom | base64 | tr '+/' 'AB' | tr -d '=')
  "${java[@]}" kafka.tools.StorageTool format --cluster-id "$cluster" --config "$properties"
fi
exec "${java[@]}" kafka.Kafka "$properties"
