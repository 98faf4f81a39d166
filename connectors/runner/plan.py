"""What is run, and with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from connectors.source import Context, Source
from pipeline.kafka.producer import Producer
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores.postgres import Pool

FETCH = 50
"""Most documents that a source is asked for at once (``connectors.source.Source.fetch``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, and how often (seconds)."""

    name: str
    tenant: str
    kind: str
    make: Callable[[Context], Source]
    """Raises Misconfigured."""
    poll_seconds: float = 150.0
    sweep_seconds: float = 600.0
    groups_seconds: float = 600.0

    def events_url(self, base: str | None) -> str | None:
        """Where this instance's events arrive; base: ``https://host`` as sources see us."""
        return f"{base.rstrip('/')}/v1/events/{self.name}" if base else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    postgres: PostgresSettings
    pool: Pool
    producer: Producer
    metrics: Metrics
    folder: Path
    """Under it each instance has a folder of its own."""
    events_url: str | None = None
    """``https://host`` as sources see us."""
    address: str | None = None
    """Of our HTTP side, as this machine sees it; None: there is none."""
