"""What each process may do in Kafka: ``acls.json``, and the program that makes the cluster's ACLs so."""
