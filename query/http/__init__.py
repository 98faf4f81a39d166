"""The query service over HTTP."""
