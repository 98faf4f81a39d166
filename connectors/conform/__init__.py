"""Whether a connector keeps the laws: its own playground, the real runner, real Kafka, the ledger.

``laws`` and ``laws_of_failure`` say what must hold; ``trial`` is one law's surroundings; ``run`` tries them one by one.
"""
