"""What is traced and how it is named: records of Kafka, requests over HTTP, calls of services outside."""
