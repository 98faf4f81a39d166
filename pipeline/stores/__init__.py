"""The two stores and the ledger's database, behind narrow adapters."""
