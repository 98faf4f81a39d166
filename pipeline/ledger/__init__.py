"""The ledger: the desired state, and how far each store has reached it. SQL is only here and in ``pipeline.stores``."""
