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

POLL_SECONDS = 150.0
SWEEP_SECONDS = 600.0
GROUPS_SECONDS = 150.0
"""The intervals without settings. A change that a poll or a listing of memberships shows is older than its interval by
the time that the reading takes: both together stay within five minutes."""
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
    poll_seconds: float = POLL_SECONDS
    sweep_seconds: float = SWEEP_SECONDS
    groups_seconds: float = GROUPS_SECONDS
    isolates_data: bool = True
    """Whether an error that a document's data cause sets that document aside; else it stops the activity, which shows
    it to whoever develops the source."""

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
