"""Proof that the ledger, pgvector and Elasticsearch agree, and repair where they do not."""
