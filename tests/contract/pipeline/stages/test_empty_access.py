"""Empty acl_tags mean nobody: applied at once, whatever could be read before, then reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from pipeline.core.canary import Canary
from pipeline.kafka.producer import Stored
from pipeline.observability.metrics import Metrics
from pipeline.stages.announce import Announcer
from query.evaluation.place import NoKafka
from query.model import MODES
from tests.support.query.library import Library, WordEmbedder, access, document
from topics.messages import AccessChanged, DocumentIndexed, DocumentUpserted

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


class Announced(NoKafka):
    """Keeps what is announced."""

    def __init__(self) -> None:
        self.messages: list[DocumentIndexed] = []

    async def send(self, *arguments: object, **options: object) -> asyncio.Future[Stored]:
        self.messages += [a for a in arguments if isinstance(a, DocumentIndexed)]
        return await super().send(*arguments, **options)


@pytest_asyncio.fixture(loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        yield library


def without_access(of: DocumentUpserted, kind: str) -> DocumentUpserted | AccessChanged:
    match kind:
        case "access":
            return access(of, [])
        case "same text":
            return document(of.external_id, of.content, acl_tags=[])
        case _:
            return document(of.external_id, "Another text of the harbour.", acl_tags=[])


@pytest.mark.parametrize("kind", ["access", "same text", "other text"])
async def test_empty_access_tags_withdraw_a_readable_document_at_once(library: Library, kind: str) -> None:
    announced, detect = Announced(), library.detect
    detect._announcer = Announcer(library.pool, announced, Metrics())  # type: ignore[arg-type]
    name = f"{kind}.md"
    before = document(name, "The text of the harbour.")
    await library.put(before)
    caller = await library.caller("acme", "staff")
    counter = detect._metrics.events.labels("nobody", "live")
    counted = counter._value.get()

    [id_] = await library.accept(without_access(before, kind))  # the stores have not followed

    for mode in MODES:
        assert (await library.search.search("text harbour", caller, mode=mode)).results == []
    assert [(m.state, m.external_id) for m in announced.messages] == [("retired", name)]
    assert counter._value.get() == counted + 1
    [(outcome,)] = await library.execute(
        "SELECT outcome FROM document_events WHERE document_id = %s ORDER BY at DESC LIMIT 1", id_
    )
    assert outcome == "nobody"

    await library.converge(id_)
    assert await library.execute("SELECT FROM chunks_g1 WHERE document_id = %s", id_) == []
    count = await library.es.count(index=library.generation.keyword_index, query={"term": {"document_id": str(id_)}})
    assert count["count"] == 0

    await library.put(access(before, ["staff"]))  # and back, when somebody may again
    again = await library.search.search("text harbour", caller)
    assert [r.passage.external_id for r in again.results] == [name]


async def test_a_document_created_with_empty_access_tags_is_recorded_but_never_indexed(library: Library) -> None:
    announced, detect = Announced(), library.detect
    detect._announcer = Announcer(library.pool, announced, Metrics())  # type: ignore[arg-type]
    await library.put(document("never.md", "The text of the harbour.", acl_tags=[]))
    [(id_, outcome)] = await library.execute(
        "SELECT d.id, e.outcome FROM documents d JOIN document_events e ON e.document_id = d.id"
        " WHERE external_id = 'never.md'"
    )
    assert outcome == "nobody"
    assert announced.messages == [], "nobody could read it before: there is nothing to drop"
    assert await library.execute("SELECT FROM chunks_g1 WHERE document_id = %s", id_) == []
    assert await library.execute("SELECT FROM readers.chunks WHERE doc_id = %s", id_) == []


async def test_canaries_are_not_announced_to_other_teams(library: Library) -> None:
    announced, canary = Announced(), Canary("acme", "wiki")
    announcer = library.detect._announcer = Announcer(library.pool, announced, Metrics())  # type: ignore[arg-type]
    beside = document("beside.md", "The text of the harbour.")
    await library.put(canary.published("The text of the harbour.", "4f2a", beside.observed_at, 1), beside)
    await library.execute("UPDATE documents SET announced_seq = 0")

    await announcer.announce_missed(0)
    assert "beside.md" in {m.external_id for m in announced.messages}
    mine = "SELECT announced_seq = seq FROM documents WHERE source = %s"
    assert await library.execute(mine, canary.source) == [(True,)], "or it would be looked at for ever"

    await library.accept(canary.deleted(datetime.now(UTC)))
    assert {m.source for m in announced.messages} == {"wiki"}
