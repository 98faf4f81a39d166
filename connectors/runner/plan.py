"""The plan of an instance, and the services that instances share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from connectors.source import Context, Source
from pipeline.kafka.producer import Producer
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores.postgres import Pool

MAX_FETCH_DOCUMENTS = 50
"""Documents that are fetched from a source at once (``connectors.source.Source.fetch``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An instance to run, and the intervals of its activities in seconds."""

    name: str
    tenant: str
    kind: str
    make: Callable[[Context], Source]
    """Creates the source. Raises Misconfigured."""
    poll_seconds: float = 150.0
    sweep_seconds: float = 600.0
    groups_seconds: float = 600.0

    def events_url(self, base: str | None) -> str | None:
        """Return where this instance's events arrive. base: ``https://host`` as sources see us."""
        return f"{base.rstrip('/')}/v1/events/{self.name}" if base else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The connections and settings that all instances of a process share."""

    postgres: PostgresSettings
    pool: Pool
    producer: Producer
    metrics: Metrics
    folder: Path
    """Holds a folder for each instance."""
    events_url: str | None = None
    """``https://host`` as sources see us."""
    address: str | None = None
    """The address of the process's HTTP server, as this machine sees it; None if it has none."""
