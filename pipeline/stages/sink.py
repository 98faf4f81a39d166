"""What both sinks share: hints sorted by generation, and setting one document aside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from uuid import UUID

import structlog

from pipeline.core.errors import PenstockError
from pipeline.core.model import Generation, Store
from pipeline.core.retry import backoff
from pipeline.ledger import work
from pipeline.stages.hints import read_hint
from pipeline.stages.stage import Incoming
from pipeline.stores.postgres import Pool, translated
from pipeline.telemetry import Metrics

log = structlog.get_logger()

SET_ASIDE_BASE_SECONDS, SET_ASIDE_CAP_SECONDS = 30.0, 3600.0
FRAMES_SHOWN = 5


class Generations:
    """The generations that a sink serves, read again when a hint names another one."""

    def __init__(self, load: Callable[[], Awaitable[Mapping[str, Generation]]]) -> None:
        self._load = load
        self._known: Mapping[str, Generation] = {}

    async def sort(self, batch: Sequence[Incoming]) -> list[tuple[Generation, list[UUID]]]:
        """A batch of hints as documents by generation, one hint each being enough. A generation that is retired, or
        whose model another process serves, is passed over."""
        ids: dict[str, dict[UUID, None]] = {}
        for record in batch:
            document, generation = read_hint(record)
            ids.setdefault(generation, {})[document] = None
        if ids.keys() - self._known.keys():
            self._known = await self._load()
        return [(self._known[name], list(documents)) for name, documents in ids.items() if name in self._known]


async def set_aside(
    pool: Pool, store: Store, document: UUID, generation: str, error: Exception, metrics: Metrics
) -> None:
    """Record one document's failure with its reason; the sweeper brings it back, later and later."""
    reason = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__} in {store}"
    with translated(store):
        async with pool.connection() as connection:
            found = await work.load(connection, generation, store, [document])
            for w in found:
                wait = backoff(
                    w.attempts + 1, base=SET_ASIDE_BASE_SECONDS, cap=SET_ASIDE_CAP_SECONDS, retry_after=None, random=1.0
                )
                await work.failed(connection, generation, store, document, error=reason, retry_in_seconds=wait)
    metrics.failed_documents.labels(store).inc()
    # Never the traceback's texts: Postgres and Elasticsearch quote the row or entry that they refuse.
    frames = [f"{Path(f.filename).name}:{f.lineno}" for f in extract_tb(error.__traceback__)[-FRAMES_SHOWN:]]
    log.error("document_set_aside", store=store, document=str(document), reason=reason, at=frames)
