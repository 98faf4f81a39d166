"""How far an upload has come, in words that its owner understands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from connectors.uploads.table import Table, Uploaded
from pipeline.core.identity import document_id
from pipeline.ledger.arrivals import Arrival, arrivals
from pipeline.stores.postgres import translated

State = Literal[
    "received", "extracting", "published", "searchable", "needs_ocr", "encrypted", "too_large", "failed", "deleted"
]
_OWN_STATES: dict[str, State] = {"needs_ocr": "needs_ocr", "encrypted": "encrypted", "too_large": "too_large"}
"""Codes that are states of their own; all others are ``failed``, with the code beside it."""


@dataclass(frozen=True, slots=True)
class Status:
    upload: Uploaded
    state: State
    reason: str | None = None
    """One line: what is wrong and what to do."""
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """What the runner says of it (``connector_items``)."""

    version: int | None
    revision: str | None
    problem_code: str | None
    problem: str | None


def revision_of(one: Uploaded, extractor: int) -> str:
    return f"{one.version}.{extractor}"


def judged(one: Uploaded, item: Item | None, arrival: Arrival | None) -> Status:
    """Pure."""
    if one.deleted_at is not None:
        return Status(one, "deleted")
    if one.problem_code is not None:
        return Status(one, _OWN_STATES.get(one.problem_code, "failed"), one.problem, one.problem_code)
    if one.extracted_at is None:
        return Status(one, "received" if one.extracting_at is None else "extracting")
    if item is None or item.revision is None or int(item.revision.partition(".")[0]) != one.version:
        return Status(one, "extracting")
    if item.problem_code is not None:  # its owner's words cannot be published
        return Status(one, "failed", item.problem, item.problem_code)
    if arrival is None or item.version is None or arrival.version is None or arrival.version < item.version:
        return Status(one, "published")
    if arrival.searchable and arrival.settled:
        return Status(one, "searchable")
    waiting = "a store has failed at it; it is tried again" if arrival.set_aside else None
    return Status(one, "published", waiting)


async def status_of(table: Table, uploads: Sequence[Uploaded]) -> list[Status]:
    tenant, source = table.me
    keys = {one.external_id: document_id(tenant, source, one.external_id) for one in uploads}
    with translated("uploads"):
        async with table.pool.connection() as connection:
            cursor = await connection.execute(
                "SELECT external_id, version, revision, problem_code, problem_message FROM connector_items"
                " WHERE tenant = %s AND source = %s AND external_id = ANY(%s) AND NOT gone",
                [tenant, source, list(keys)],
            )
            items = {id_: Item(*rest) for id_, *rest in await cursor.fetchall()}
            arrived = await arrivals(connection, list(keys.values()))
    return [judged(one, items.get(one.external_id), arrived.get(keys[one.external_id])) for one in uploads]
