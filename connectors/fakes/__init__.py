"""Fake servers that respond as the published APIs do: one stateful ASGI application for each source."""
