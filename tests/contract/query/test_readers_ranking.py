"""Another team's service, which follows docs/readers.md, ranks as ours does."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from pydoc_data.topics import topics
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio
from psycopg.rows import dict_row

from deploy.local.stack import Stack
from pipeline.core.graph import CAREFUL_PARAMETERS
from pipeline.stores.graph import RESCORED
from query.access.callers import Readable
from query.embedding.embedders import QueryEmbedder
from query.retrieval import search as search_module
from query.retrieval.arrange import Group, Hit
from query.retrieval.keywords import build
from query.retrieval.search import Search
from query.retrieval.vectors import (
    CAREFUL_GROWTH,
    EF_SEARCH,
    EF_SEARCH_ROWS,
    GROWTH,
    MOST_EF_SEARCH,
    OVERFETCH,
    VISIT_COST,
    Tuning,
)
from query.settings import RetrievalSettings
from tests.support.query.library import Library, WordEmbedder, document
from tests.support.query.readers_kit import another_team, example
from tests.support.space import PROJECT

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

reader = example()
QUESTIONS = (
    "how does a generator expression differ from a list comprehension",
    "finally clause of a try statement",
    "__getattr__ or __getattribute__",
    "What is printed by 'print(sys.path)', PROJ-4821 and src/app/main.py?",
    "assignment",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    """A quarter of the documents is readable to the board alone."""
    async with Library.create(stack, WordEmbedder()) as library:
        names = sorted(topics, key=lambda name: (len(topics[name]), name))[:60]
        await library.put(
            *(
                document(f"{name}.md", topics[name], title=name, acl_tags=["board" if n % 4 == 0 else "user:ann"])
                for n, name in enumerate(names)
            )
        )
        yield library


@pytest.mark.parametrize("question", QUESTIONS)
async def test_the_documented_keyword_query_is_the_services_own(question: str) -> None:
    tags = ("wiki/staff", "wiki/user:ann")
    sent = json.dumps(build("acme", Readable((), tags, tags), question))
    assert json.dumps(reader.keyword_query(question, "acme", list(tags))) == sent


async def test_the_documented_query_is_the_file_of_the_example() -> None:
    page = (PROJECT / "docs" / "readers.md").read_text()
    [shown] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert shown == (PROJECT / "examples" / "keyword_query.json").read_text()
    json.loads(shown)


def separate(hits: Sequence[Hit], *, top: int, per_document: int) -> list[Group]:
    return [Group([hit]) for hit in hits[:top]]


async def ours(library: Library, question: str, monkeypatch: pytest.MonkeyPatch) -> list[UUID]:
    """The chunks as our service fuses them, best first: before relevance feedback, and before neighbours are merged and
    exact names put first."""
    monkeypatch.setattr(search_module, "arrange", separate)
    monkeypatch.setattr(search_module, "exact_first", lambda hits, named: list(hits))
    settings = RetrievalSettings(feedback=False, cached_queries=0)
    search = Search(library.pool, library.es, QueryEmbedder(WordEmbedder), settings=settings)
    results = await search.search(question, await library.caller("acme", principals=["ann"]), top=20)
    assert not results.degraded
    return [result.passage.chunk_id for result in results.results]


@pytest.mark.parametrize("question", QUESTIONS)
async def test_a_reader_that_follows_the_page_ranks_as_the_service_does(
    library: Library, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await ours(library, question, monkeypatch)
    async with another_team(library) as team:
        team.row_factory = dict_row  # type: ignore[assignment]
        service = reader.Reader(team, library.es, WordEmbedder(), "acme")
        rows: Sequence[dict[str, Any]] = await service.answer("ann", question, top=20)
    assert len(expected) == 20
    assert [row["id"] for row in rows] == expected


async def test_readers_search_the_graph_with_the_parameters_of_the_service(library: Library) -> None:
    [(options, source)] = await library.execute(
        "SELECT proconfig, prosrc FROM pg_proc"
        " WHERE oid = 'readers.nearest(halfvec, text, text[], integer)'::regprocedure"
    )
    settings = dict(option.split("=", 1) for option in options)
    power = f"power(greatest(c.reltuples, 0) / {EF_SEARCH_ROWS}, CASE WHEN ("
    depth = f"least({MOST_EF_SEARCH}, {EF_SEARCH} * greatest(1, {power}"
    assert f"set_config('hnsw.ef_search',\n        {depth}" in source
    assert f"SELECT 'm={CAREFUL_PARAMETERS.neighbours}' = ANY(" in source
    assert f") THEN {CAREFUL_GROWTH} ELSE {GROWTH} END::float8)))::integer::text, true)" in source
    assert settings["hnsw.max_scan_tuples"] == str(Tuning().max_scan_tuples)
    assert f"greatest({Tuning().always_exact_rows}, sqrt({VISIT_COST:.1f} * wanted * rescored * " in source
    assert f"wanted    integer := {OVERFETCH} * least(" in source, "wanted is OVERFETCH times as many as requested"
    assert f"rescored := {RESCORED['binary']};" in source, "as many more rows as a graph of signs needs"
