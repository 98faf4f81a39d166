"""The ledger: what shall be, and how far each store is. SQL lives here and in ``pipeline.stores``, nowhere else."""
