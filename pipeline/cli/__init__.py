"""The ``penstock`` command."""
