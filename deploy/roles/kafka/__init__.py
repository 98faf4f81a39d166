"""Rights of each process in Kafka: ``acls.json``, and the program that applies them to the cluster."""
