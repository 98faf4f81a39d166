"""Statements by parts of their texts, and what every model of some uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from tests.simulation.database import Row, Statement, Transaction

GENERATION = "g1"
Maker = Callable[[str], Statement]
"""Makes an implementation from a statement's text."""
_KNOWN: list[tuple[str, Maker]] = []
_STATEMENTS: dict[str, Statement] = {}


class UnknownStatement(BaseException):
    """Nobody has taught the simulation this statement. It is no error that the product may handle."""


def written_for(*parts: str) -> Callable[[Maker], Maker]:
    """Register a maker of implementations under a part of the statement's text (between ``^`` and ``;``, its begin and
    end); the first one registered that fits counts."""

    def register(maker: Maker) -> Maker:
        _KNOWN.extend((part, maker) for part in parts)
        return maker

    return register


def statement(*parts: str) -> Callable[[Statement], Statement]:
    """Register an implementation likewise."""

    def register(implementation: Statement) -> Statement:
        written_for(*parts)(lambda _text: implementation)
        return implementation

    return register


def find(text: str) -> Statement:
    """The implementation of a statement."""
    implementation = _STATEMENTS.get(text)
    if implementation is None:
        flat = f"^{' '.join(text.split())};"
        maker = next((known for part, known in _KNOWN if part in flat), None)
        if maker is None:
            raise UnknownStatement(f"teach tests/simulation/statements this statement: {flat}")
        implementation = _STATEMENTS[text] = maker(text)
    return implementation


def changed(row: Row | None, **values: Any) -> Row:
    return {**(row or {}), **values}


def tags_of(tx: Transaction, access_id: int | None) -> tuple[list[str] | None, list[str] | None]:
    if access_id is None:
        return None, None
    return next((r["acl_tags"], r["required_tags"]) for _, r in tx.rows("access_sets") if r["id"] == access_id)


@statement("LOCK TABLE generations_lock IN ROW EXCLUSIVE MODE")
def _shared(_tx: Transaction, _p: Any) -> int:
    return 0  # generations never change in a history


@statement("SELECT pg_try_advisory_xact_lock(")
def _try_lock(tx: Transaction, p: Any) -> list[tuple[Any, ...]]:
    return [(tx.try_lock("advisory", p[0]),)]


@statement("SET LOCAL ")
def _set(_tx: Transaction, _p: Any) -> int:
    return 0


@statement(
    "calibration, vectors, quantisation, sketched, centred, vector_send(centre) AS centre FROM generations WHERE state"
)
def _generations(tx: Transaction, _p: Any) -> list[tuple[Any, ...]]:
    return [tuple(row["columns"]) for _, row in tx.rows("generations")]


def document_columns(tx: Transaction, id_: UUID, generation: str) -> Row:
    """A document's columns with its access set and its manifest, as ``pipeline.ledger.work.work_of`` takes them."""
    document, manifest = tx.get("documents", id_), tx.get("manifests", id_, generation)
    assert document is not None
    acl_tags, required_tags = tags_of(tx, document["access_id"])
    names = (
        "tenant",
        "source",
        "external_id",
        "content_hash",
        "access_id",
        "title",
        "source_url",
        "author",
        "media_type",
        "source_modified_at",
        "keys",
        "lane",
    )
    return {
        **{name: document[name] for name in names},
        "id": id_,
        "alive": document["deleted_at"] is None and document["version"] is not None,
        "acl_tags": acl_tags,
        "required_tags": required_tags,
        "manifest_hash": manifest["content_hash"] if manifest else None,
        **{name: manifest[name] if manifest else None for name in ("chunk_ids", "token_counts", "spans", "headings")},
    }
