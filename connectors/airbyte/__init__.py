"""Airbyte sources: programs that write records, which become documents as rows of tables do."""
