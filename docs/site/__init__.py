"""The documentation site: Sphinx's configuration, and what it generates from the code (docs/adr/0065)."""
