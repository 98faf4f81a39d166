"""Whether the database that answers is the ledger that was accepted, and what it may be used for meanwhile.

A failover may lose the last transactions of the old primary, a backup lacks everything since it was made: revocations
among it. Postgres cannot say what it has lost, but every promotion begins a new timeline, and every new cluster has
another system identifier (docs/adr/0038-fencing.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["open", "replaying", "rewinding"]
"""How far ``penstock recover`` has come. rewinding: the ledger's server is accepted, the offsets in Kafka are not back
yet; replaying: what was lost is being read again; open: the ledger has caught up."""

Use = Literal["queries", "intake", "stores", "any"]
"""The purpose of a connection. queries: showing documents; intake: writing what Kafka and the sources say into the
ledger; stores: making the stores equal to the ledger; any: looking at the ledger itself, and recovering it."""

NEEDS: dict[Use, tuple[State, ...]] = {
    "queries": ("open",),
    "intake": ("open", "replaying"),  # an event that is handled before the rewinding hides what was lost
    "stores": ("open", "replaying", "rewinding"),  # a lost index is rebuilt before the rewinding
}
"""The states in which each use is allowed."""

STANDBY = "Postgres is a standby, which may lag behind: set PENSTOCK_POSTGRES_DSN to the primary"
CHANGED = (
    "the ledger is not on the server and timeline that it was accepted on, so revocations may be lost: run"
    " `penstock recover --failover` after a failover, `penstock recover --since TIME` after a restore"
)
RECOVERING = (
    "the ledger is being recovered, and may lack revocations until then: wait for `penstock recover`, or run it again"
    " if it has failed"
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a primary."""

    system_identifier: int
    """Drawn by initdb; base backups and standbys have their primary's."""
    timeline: int
    """Incremented by every promotion and every recovery to a point in time."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The identity that the ledger was accepted on, as recorded in the ledger itself, and how far a recovery is."""

    identity: Identity
    state: State


def refusal(server: Identity | None, accepted: Accepted | None, use: Use) -> str | None:
    """Why the ledger must not be used for this now, in one line that says what to do; None: it may.

    server: the one that answers; None: it is in recovery. accepted: None when the ledger remembers nothing.
    """
    if use == "any":
        return None
    if server is None:
        return STANDBY
    if accepted is None or accepted.identity != server:
        return CHANGED
    return None if accepted.state in NEEDS[use] else RECOVERING
