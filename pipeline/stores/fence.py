"""The fence as Postgres knows it: which server answers, and which one the ledger was accepted on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.core.errors import Fenced, Misconfigured
from pipeline.core.fence import CHANGED, STANDBY, Accepted, Identity, State, Use, refusal

if TYPE_CHECKING:
    from pipeline.stores.postgres import Connection

# The control file's timeline lags behind a promotion until the next checkpoint; the name of the current WAL file does
# not. It cannot be asked for on a standby.
_LOOK = """
    SELECT c.system_identifier,
        CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END,
        f.system_identifier, f.timeline, f.state
    FROM pg_control_system() c LEFT JOIN fence f ON true
"""
_ACCEPT = """
    INSERT INTO fence (system_identifier, timeline, state) VALUES (%s, %s, %s)
    ON CONFLICT (only_row) DO UPDATE SET system_identifier = EXCLUDED.system_identifier, timeline = EXCLUDED.timeline,
        state = EXCLUDED.state, accepted_at = now()
"""


async def look(connection: Connection) -> tuple[Identity | None, Accepted | None]:
    """(the server that answers, None: a standby; what the ledger was accepted on). One statement."""
    row = await (await connection.execute(_LOOK)).fetchone()
    assert row is not None
    system, timeline, accepted_system, accepted_timeline, state = row
    server = None if timeline is None else Identity(system, int(timeline, 16))
    accepted = None if state is None else Accepted(Identity(accepted_system, accepted_timeline), state)
    return server, accepted


async def require(connection: Connection, use: Use) -> None:
    """Raises Fenced when the ledger must not be used for this now."""
    if why := refusal(*await look(connection), use):
        raise Fenced(why)


async def accept(connection: Connection, state: State) -> None:
    """The ledger is this server's from now on; only rewinding begins on another server than the accepted one. Raises
    Misconfigured on a standby, Fenced when the server has changed since rewinding began."""
    server, accepted = await look(connection)
    if server is None:
        raise Misconfigured(STANDBY)
    if state != "rewinding" and (accepted is None or accepted.identity != server):
        raise Fenced(CHANGED)
    await connection.execute(_ACCEPT, [server.system_identifier, server.timeline, state])
