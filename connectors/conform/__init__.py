"""Tests whether a connector keeps the laws: on its own playground, with the real runner, Kafka and the ledger.

``laws`` and ``conversations`` state what must hold, ``trial`` is the environment of one law, and ``run`` tests the laws
one after another.
"""
