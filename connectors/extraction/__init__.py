"""Bytes of a file → text, title and author. Knows nothing of where the bytes came from."""
