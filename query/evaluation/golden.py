"""Golden questions: questions about existing documents, with judgements of the passages that answer them.

A judgement names a document and words of its passage (the anchor), never a chunk. It stays current as long as the
document contains those words, whatever is edited around them, chunked again or embedded by another model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid5

from pipeline.core.identity import document_id
from pipeline.stores.postgres import Connection
from query.access.tenant_rows import set_tenant
from query.evaluation.dataset import BadDataset
from query.model import SearchResults

NAMESPACE = UUID("6f1f3a56-5e0b-5c0e-9d5f-0d6f0f4f7a11")
MAX_ANCHOR_CHARACTERS = 500
"""The longest anchor, a sentence or two: a longer one may not fit into one passage."""


@dataclass(frozen=True, slots=True)
class Judged:
    source: str
    external_id: str
    anchor: str = ""
    """Words of the passage; empty: any passage of the document matches."""
    gain: int = 1
    """The relevance from 1 to 10; larger is better."""

    @property
    def key(self) -> str:
        return json.dumps([self.source, self.external_id, self.anchor])


@dataclass(frozen=True, slots=True)
class Golden:
    tenant: str
    text: str
    judged: tuple[Judged, ...]
    principals: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    reference: str | None = field(default=None, repr=False)

    @property
    def id(self) -> UUID:
        return uuid5(NAMESPACE, f"{self.tenant}\n{self.text}")


def flat(text: str) -> str:
    """The text without differences of case and white space, as anchors are compared."""
    return " ".join(text.split()).casefold()


# Files: one JSON object a line


def write(golden: Iterable[Golden]) -> Iterator[str]:
    for g in golden:
        judged = [
            {"source": j.source, "external_id": j.external_id, "anchor": j.anchor, "gain": j.gain} for j in g.judged
        ]
        yield json.dumps(
            {
                "tenant": g.tenant,
                "query": g.text,
                "as": list(g.principals),
                "tags": list(g.tags),
                "reference": g.reference,
                "judgements": judged,
            },
            ensure_ascii=False,
        )


def read(lines: Iterable[str]) -> Iterator[Golden]:
    """Raises BadDataset, with the line's number."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield _parsed(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise BadDataset(
                    f'line {number} is not a golden question: {{"tenant", "query", "as": […], "tags": […], "reference",'
                    ' "judgements": [{"source", "external_id", "anchor", "gain": 1 to 10}]}'
                ) from error


def _parsed(line: Mapping[str, Any]) -> Golden:
    judged = tuple(
        Judged(_text(j["source"]), _text(j["external_id"]), str(j.get("anchor") or "").strip(), int(j.get("gain", 1)))
        for j in line["judgements"]
    )
    if not judged or not all(1 <= j.gain <= 10 and len(j.anchor) <= MAX_ANCHOR_CHARACTERS for j in judged):
        raise ValueError("judgements")
    reference = line.get("reference")
    return Golden(
        _text(line.get("tenant", "default")),
        _text(line["query"]),
        judged,
        tuple(map(_text, line.get("as") or ())),
        tuple(map(_text, line.get("tags") or ())),
        None if reference is None else _text(reference),
    )


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\x00" in value:
        raise ValueError("text")
    return value.strip()


# Postgres


async def store(connection: Connection, golden: Golden) -> None:
    """Store a golden question in one transaction; one with the same text is replaced. Raises psycopg.Error."""
    async with connection.transaction():
        await set_tenant(connection, golden.tenant)
        await connection.execute(
            "INSERT INTO eval_queries (id, tenant, text, principals, tags, reference) VALUES (%s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (id) DO UPDATE SET principals = excluded.principals, tags = excluded.tags,"
            " reference = excluded.reference",
            [golden.id, golden.tenant, golden.text, list(golden.principals), list(golden.tags), golden.reference],
        )
        await connection.execute("DELETE FROM eval_judgements WHERE query_id = %s", [golden.id])
        async with connection.cursor() as cursor:
            await cursor.executemany(
                "INSERT INTO eval_judgements (query_id, source, external_id, anchor, gain) VALUES (%s, %s, %s, %s, %s)"
                " ON CONFLICT (query_id, source, external_id, anchor) DO UPDATE SET gain = excluded.gain",
                [(golden.id, j.source, j.external_id, j.anchor, j.gain) for j in golden.judged],
            )


async def delete(connection: Connection, tenant: str, text: str) -> bool:
    """Delete a golden question. False if there is none. Raises psycopg.Error."""
    await set_tenant(connection, tenant)
    cursor = await connection.execute("DELETE FROM eval_queries WHERE tenant = %s AND text = %s", [tenant, text])
    return cursor.rowcount > 0


async def load(connection: Connection, tenant: str | None = None) -> list[Golden]:
    """The stored golden questions, ordered by tenant and text. tenant: None for all. Raises psycopg.Error."""
    if tenant is not None:
        return await _load(connection, tenant)
    cursor = await connection.execute("SELECT golden_tenants()")
    tenants = [name for (name,) in await cursor.fetchall()]
    return [golden for name in tenants for golden in await _load(connection, name)]


async def _load(connection: Connection, tenant: str) -> list[Golden]:
    await set_tenant(connection, tenant)
    cursor = await connection.execute(
        "SELECT q.text, q.principals, q.tags, q.reference, j.source, j.external_id, j.anchor, j.gain"
        " FROM eval_queries q JOIN eval_judgements j ON j.query_id = q.id"
        " WHERE q.tenant = %s ORDER BY q.text, j.gain DESC, j.source, j.external_id",
        [tenant],
    )
    questions: dict[str, Golden] = {}
    for text, principals, tags, reference, *judged in await cursor.fetchall():
        known = questions.get(text) or Golden(tenant, text, (), tuple(principals), tuple(tags), reference)
        questions[text] = replace(known, judged=(*known.judged, Judged(*judged)))
    return list(questions.values())


async def promoted(connection: Connection, tenant: str) -> set[UUID]:
    """The golden questions that were promoted from what people asked. Raises psycopg.Error."""
    cursor = await connection.execute(
        "SELECT id, answers IS NOT NULL OR givers IS NOT NULL FROM eval_queries WHERE tenant = %s", [tenant]
    )
    return {id_ for id_, is_promoted in await cursor.fetchall() if is_promoted}


async def current(connection: Connection, golden: Sequence[Golden]) -> tuple[list[Golden], int]:
    """The golden questions with their current judgements, and the number of outdated judgements, whose document or
    words no longer exist and which are therefore ignored. Raises psycopg.Error."""
    lost, left = 0, []
    for question in golden:
        ids = {document_id(question.tenant, j.source, j.external_id): None for j in question.judged}
        await set_tenant(connection, question.tenant)
        cursor = await connection.execute(
            "SELECT d.id, b.text FROM documents d JOIN document_bodies b ON b.document_id = d.id"
            " WHERE d.id = ANY(%s) AND d.deleted_at IS NULL AND d.version IS NOT NULL",
            [list(ids)],
        )
        texts = {id_: flat(text) for id_, text in await cursor.fetchall()}
        judged = tuple(
            j
            for j in question.judged
            if flat(j.anchor) in texts.get(document_id(question.tenant, j.source, j.external_id), "")
            and document_id(question.tenant, j.source, j.external_id) in texts
        )
        lost += len(question.judged) - len(judged)
        if judged:
            left.append(
                Golden(question.tenant, question.text, judged, question.principals, question.tags, question.reference)
            )
    return left, lost


def ranking(golden: Golden, results: SearchResults) -> list[str]:
    """The results as a ranking of judgements: each at the first passage that contains it; other passages have names of
    their own. A duplicate that is listed with another passage counts at that passage's rank."""
    ranked: list[str] = []
    for n, result in enumerate(results.results):
        places = {(p.source, p.external_id) for p in (result.passage, *result.also)}
        text = flat(result.text)
        hits = [
            j.key
            for j in golden.judged
            if (j.source, j.external_id) in places and flat(j.anchor) in text and j.key not in ranked
        ]
        ranked += hits or [f"other {n}"]
    return ranked


def gains(golden: Golden) -> dict[str, int]:
    return {j.key: j.gain for j in golden.judged}
