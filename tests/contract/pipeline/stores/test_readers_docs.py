"""Every statement of docs/readers.md, run as another team would; the frozen mapping, as the server has it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
import pytest_asyncio
from pgvector import HalfVector

from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from tests.support.query.leak_paths import Paths
from tests.support.query.leaks import COMMON, Asker, Model, World, may_read
from tests.support.query.library import WordEmbedder, document
from tests.support.query.readers_kit import another_team, example
from tests.support.space import PROJECT

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

PAGE = (PROJECT / "docs" / "readers.md").read_text()
STATEMENTS = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
reader = example()
CHECK = next(statement for statement in STATEMENTS if "MATERIALIZED" in statement)
GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "readers" / "elasticsearch.v1.json").read_text())


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def paths(stack: Stack) -> AsyncIterator[Paths]:
    async with Paths.open(stack) as paths:
        await paths.library.put(document("page.md", f"{COMMON} of the crane.", acl_tags=["user:ann"], required_tags=[]))
        yield paths


async def run(team: psycopg.AsyncConnection[Any], statement: str, **values: object) -> list[tuple[Any, ...]]:
    """A statement of the page; its first line says what stands for what."""
    names = re.findall(r"\$\d (\w+)", statement.partition("\n")[0])
    async with psycopg.AsyncRawCursor(team) as cursor:
        await cursor.execute(statement.encode(), [values[name] for name in names])
        return await cursor.fetchall()


@pytest.mark.parametrize("statement", STATEMENTS)
async def test_every_statement_of_the_readers_page_works(paths: Paths, statement: str) -> None:
    id_ = document_id("acme", "wiki", "page.md")
    [(chunk,)] = await paths.library.execute("SELECT id FROM readers.chunks WHERE doc_id = %s", id_)
    async with another_team(paths.library) as team:
        rows = await run(
            team,
            statement,
            tenant="acme",
            principal="ann",
            tags=["wiki/user:ann"],
            ids=[chunk],
            doc_id=id_,
            query=HalfVector(WordEmbedder()._vector("crane")),
        )
        assert len(rows) == 1
        if "$" in statement and "access_of" not in statement:
            others = {"tenant": "beta", "tags": ["wiki/staff"]}
            for name, value in others.items():
                values = {"tenant": "acme", "tags": ["wiki/user:ann"], "ids": [chunk], "doc_id": id_} | {name: value}
                assert await run(team, statement, query=HalfVector(WordEmbedder()._vector("crane")), **values) == []


async def test_the_documented_keyword_search_returns_only_readable_documents(paths: Paths) -> None:
    """While the index is behind, too."""
    worlds = [World(500 + n, f"page{n}") for n in range(2)]
    models = {id(world): Model() for world in worlds}
    behind: list[UUID] = []
    count = 0
    async with another_team(paths.library) as team:
        for part, follows in (("first", True), ("then", False), (None, True)):
            moved: list[UUID] = []
            for world in worlds if part else ():
                models[id(world)].learn(*getattr(world, part))
                moved += await paths.learn(getattr(world, part))
            if follows:
                await paths.library.converge(*(moved or behind))
            behind = moved
            for world in worlds:
                for asker in world.askers:
                    for principal in asker.principals:
                        alone, model = Asker(asker.tenant, (principal,), ()), models[id(world)]
                        may = {document_id(*key) for key in may_read(model.living(), asker.tenant, model.held(alone))}
                        shown = await answer(paths, team, asker.tenant, principal)
                        assert shown == may if follows else shown <= may, (world, alone)
                        count += len(shown)
    assert count > 30, "worlds in which nobody reads anything prove nothing"


async def answer(paths: Paths, team: psycopg.AsyncConnection[Any], tenant: str, principal: str) -> set[UUID]:
    """The documents that a reader who follows the page finds."""
    [(tags,)] = await run(team, STATEMENTS[0], tenant=tenant, principal=principal)
    [(_, _, _, _, index)] = await run(team, next(s for s in STATEMENTS if "readers.generation" in s))
    hits = await paths.library.es.search(
        index=index, query=reader.keyword_query(COMMON, tenant, tags), size=1_000, source=False
    )
    ids = [UUID(hit["_id"]) for hit in hits["hits"]["hits"]]
    return {row[1] for row in await run(team, CHECK, ids=ids, tenant=tenant, tags=tags)}


# The frozen mapping


def differences(promised: Any, results: Any, at: str = "") -> list[str]:
    """Where something that was promised is not there as it was: more is fine, less and other are not."""
    if isinstance(promised, dict) and isinstance(results, dict):
        return [line for key in promised for line in differences(promised[key], results.get(key), f"{at}/{key}")]
    return [] if str(promised).lower() == str(results).lower() else [at]


async def test_the_index_mapping_matches_the_golden_file_and_the_readers_page(paths: Paths) -> None:
    index = paths.library.generation.keyword_index
    index_body = (await paths.library.es.indices.get(index=index)).body[index]
    settings = index_body["settings"]["index"]
    real = {"mappings": index_body["mappings"], "analysis": settings["analysis"], "similarity": settings["similarity"]}
    assert differences(GOLDEN, real) == []
    fields = real["mappings"]["properties"]
    assert differences(GOLDEN, {**real, "mappings": {"dynamic": "strict", "properties": {**fields, "text": {}}}}) != []
    named = set(
        re.findall(
            r"`([a-z_.]+)`",
            "".join(
                line.split("|")[1] for line in PAGE.partition("| `_id` |")[2].partition("\n\n")[0].splitlines()[1:]
            ),
        )
    )
    assert {name for name in named if "." not in name} == GOLDEN["mappings"]["properties"].keys()
