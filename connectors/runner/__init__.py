"""Runs one instance of a source: asks it, compares, publishes, and keeps how far it came.

``compare`` and ``membership`` are pure. ``rows`` and ``state`` are what is kept in Postgres, ``publish`` is the way
there over Kafka; ``crawl``, ``sweep`` and ``identities`` are what is done, ``activity`` is when, ``instance`` is all.
"""
