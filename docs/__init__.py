"""The documentation, and the program that builds its site (docs.site)."""
