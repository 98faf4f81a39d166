"""BM25 as computed here equals BM25 as the server computes it, for entries that it holds."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any
from uuid import UUID

import pytest

from pipeline.core.model import Span
from pipeline.ledger.entry import content_fields, cut
from query.retrieval.keywords import bm25_scores
from query.retrieval.scoring import Gained, analyse, keyword_query
from tests.support.query.library import Library, document
from tests.support.query.questions import QUESTIONS

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

OTHERS = (
    "Wie lange werden die Protokolle in der Datei config.yaml aufbewahrt?",
    "ERR_CONN_RESET in src/app/main.py",
    "Donaudampfschiff",
    "the loop body is executed " * 12,
)
GERMAN = """# Aufbewahrung

Die Protokolle werden neunzig Tage lang aufbewahrt. Danach werden die Protokolle gelöscht, und zwar jede Nacht um drei.
Wer sie länger braucht, trägt das in der Datei config.yaml ein. Fehler wie ERR_CONN_RESET stehen in src/app/main.py."""


async def entries(library: Library, tenant: str) -> dict[UUID, dict[str, Any]]:
    rows = await library.execute(
        "SELECT d.title, b.text, m.chunk_ids, m.spans, m.headings FROM documents d"
        " JOIN document_bodies b ON b.document_id = d.id JOIN manifests m ON m.document_id = d.id WHERE d.tenant = %s",
        tenant,
    )
    result = {}
    for title, body, ids, spans, headings in rows:
        for id_, pieces, above in zip(ids, spans, headings, strict=True):
            of: list[Span] = [(start, end) for start, end in pieces]
            result[id_] = content_fields(title, above, cut(body, of))
    return result


async def test_a_text_scores_as_it_does_in_the_index(library: Library, tenant: str) -> None:
    names = sorted(topics)[:40]
    await library.put(
        *(document(f"{name}_LoopBody.rst", topics[name], tenant=tenant, media_type="text/x-rst") for name in names),
        document("Datei_Aufbewahrung.md", GERMAN, tenant=tenant),
    )
    known = await entries(library, tenant)
    texts = await analyse(library.es, library.generation, known)
    compared = 0
    for question in [*(question for question, _ in QUESTIONS), *OTHERS]:
        for more in ({}, {"loop": 0.7, "Datei": 0.3}):
            expected = await bm25_scores(library.es, library.generation, list(known), question, more)
            query = await keyword_query(library.es, library.generation, question, more)
            scores = {entry.chunk_id: score for entry in texts if (score := query.score(entry, Gained())) is not None}
            assert scores.keys() == expected.keys(), question
            for id_, score in scores.items():
                assert score == pytest.approx(expected[id_], rel=1e-3), (question, more, known[id_]["title"])
                compared += 1
    assert compared > 1000
