"""The identities stage: writes each principal's full set of groups to the ledger.

The newest observation wins; of two observations of the same time, what both contain. What was observed of a source or a
person before these were forgotten changes nothing (docs/adr/0111-floors-of-people.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pipeline.core.conversations import subject_digest
from pipeline.core.errors import Poison
from pipeline.core.identity import OWN_TAG
from pipeline.core.model import Lane
from pipeline.stages.admission import UNCHECKED, Unchecked
from pipeline.stages.dead import DeadLetters
from pipeline.stages.events import check_record
from pipeline.stages.stage import FinalStage, Incoming
from pipeline.stores.postgres import Pool, translated
from topics.codec import BadMessage, decode
from topics.messages import IdentityChanged
from topics.registry import IDENTITIES, Topic

TOMBSTONE = ("penstock-forget", b"1")
"""The header of the records without a value that `penstock forget` sends, so that compaction removes a person's name
from the topic. A record without a value that lacks it is poison: a principal that has left is published with an empty
set of groups, and a tombstone would remove that from the topic."""


class Identities(FinalStage):
    """Writes memberships.

    Law (that of ``Stage``): ``handle`` may be called again with the same records, at any time, in any process.
    """

    name = "identities"
    topics: dict[Lane, Topic] = {"live": IDENTITIES}  # noqa: RUF012
    batch_size = 100

    def __init__(self, pool: Pool, dead: DeadLetters, admission: Unchecked = UNCHECKED) -> None:
        self._pool = pool
        self._dead = dead
        self._admission = admission

    async def handle(self, batch: Sequence[Incoming]) -> None:
        now = datetime.now(UTC)
        sorted_batch = await self._admission.sort(
            batch, lambda record: read_identity(record, now=now), lambda message: message, stage=self.name
        )
        rows = [
            (m.tenant, m.source, m.principal, m.groups, m.observed_at, subject_digest(m.principal))
            for m in sorted_batch.accepted
            if isinstance(m, IdentityChanged)
        ]
        if rows:
            await self._accept(rows)
        self._dead.count_accepted(sorted_batch.valid, stage=self.name)
        await self._dead.add_all(sorted_batch.poison, stage=self.name)  # last: a flood must not delay valid records

    async def _accept(self, rows: Sequence[tuple[str, str, str, list[str], datetime, bytes]]) -> None:
        with translated("identities"):
            async with self._pool.connection() as connection:
                await connection.cursor().executemany(
                    "INSERT INTO memberships AS m (tenant, source, principal, groups, observed_at)"
                    " SELECT tenant, source, principal, groups, observed_at"
                    " FROM (VALUES (%s, %s, %s, %s::text[], %s::timestamptz, %s::bytea))"
                    " AS r (tenant, source, principal, groups, observed_at, subject)"
                    " WHERE NOT EXISTS (SELECT FROM membership_floors f WHERE f.tenant = r.tenant"
                    " AND f.source = r.source AND f.observed_at >= r.observed_at)"
                    " AND NOT EXISTS (SELECT FROM person_floors f WHERE f.tenant = r.tenant"
                    " AND f.subject = r.subject AND f.observed_at >= r.observed_at)"
                    " ON CONFLICT (tenant, principal, source) DO UPDATE"
                    " SET observed_at = excluded.observed_at, groups = CASE"
                    " WHEN excluded.observed_at > m.observed_at THEN excluded.groups"
                    " ELSE ARRAY(SELECT unnest(m.groups) INTERSECT SELECT unnest(excluded.groups)) END"
                    " WHERE excluded.observed_at >= m.observed_at",
                    rows,
                )

    async def set_aside(self, record: Incoming, error: Exception) -> None:
        await self._dead.add(record, stage=self.name, error=error)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The tenant and source of a record without a value. It changes no membership."""

    tenant: str
    source: str


def read_identity(record: Incoming, *, now: datetime) -> IdentityChanged | Tombstone:
    """Parse and check one record. now: the time against which observed_at is checked. Raises Poison, whose message
    quotes no content."""
    if record.value is None and TOMBSTONE in record.headers:
        parts = (record.key or b"").decode("utf-8", "replace").split("/", 2)
        if len(parts) != 3 or not all(parts):
            raise Poison("wrong_key", "a tombstone's key is not TENANT/SOURCE/PRINCIPAL")
        return Tombstone(parts[0], parts[1])
    try:
        message = decode(record.value, record.headers)
    except BadMessage as error:
        raise Poison(error.code, str(error)) from error
    if isinstance(message, IdentityChanged):
        check_record(record, message, now=now)
        if any(group.startswith(OWN_TAG) for group in message.groups):
            raise Poison("reserved_group", "groups: a name that begins with user: is held by that principal alone")
        return message
    raise Poison("wrong_topic", f"{message.kind} does not belong on {record.topic}")
