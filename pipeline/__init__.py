"""The ingestion pipeline: what shall be (the ledger) and how both stores are made to match it."""
