"""Honest servers that answer as the published APIs do: one stateful ASGI application a source."""
