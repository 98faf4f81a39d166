"""Penstock and other indexers of documents on one machine in one run: ``python -m bench.peers``."""
