"""Runs one instance of a source: reads it, compares, publishes, and records its progress.

``compare`` decides what to publish, and is pure. ``rows``, ``membership`` and ``state`` are the tables in Postgres;
``publish`` writes to Kafka and to them. ``crawl``, ``sweep``, ``identities`` and ``reconcile`` are the activities,
which ``activity`` schedules and ``instance`` puts together.
"""
