"""Why a document is searchable or not, on a real ledger and real stores."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cli.why import names
from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from pipeline.diagnosis import story
from pipeline.diagnosis.story_json import as_json
from pipeline.embedding.port import Embedded
from tests.support.query.library import Library, WordEmbedder, access, deletion, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


class Model(WordEmbedder):
    """Refuses passages with a certain word."""

    async def embed_documents(self, texts: list[str]) -> Embedded:  # type: ignore[override]
        embedded = await super().embed_documents(texts)
        refused = {n: "refused by the model" for n, text in enumerate(texts) if "unspeakable" in text}
        return Embedded(embedded.vectors, refused)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, Model()) as library:
        yield library


async def why(library: Library, tenant: str, name: str) -> dict[str, Any]:
    async with library.pool.connection() as connection:
        documents = await story.find(connection, tenant, names(name))
        assert len(documents) == 1, documents
        read_story = await story.read(connection, documents[0][0].id)
    answer: dict[str, Any] = json.loads(json.dumps(as_json(read_story)))
    promised = {"document", "events", "generations", "access", "dead", "searchable", "reason"}
    assert set(answer) == promised | {"state", "next", "notes"}
    return answer


async def test_why_describes_a_document_that_both_stores_hold(library: Library, tenant: str) -> None:
    await library.put(document("a.md", "# One\n\nText.", tenant=tenant, title="First", required_tags=["r"]))
    explanation = await why(library, tenant, "a.md")
    assert explanation["searchable"] is True
    assert explanation["reason"] == "both stores hold its 1 chunks"
    assert (explanation["document"]["external_id"], explanation["document"]["title"]) == ("a.md", "First")
    assert explanation["access"]["acl_tags"] == ["wiki/staff"]
    assert explanation["access"]["required_tags"] == ["wiki/r"]
    [event] = explanation["events"]
    assert (event["kind"], event["outcome"], event["seq"]) == (
        "document.upserted.v1",
        "created",
        explanation["document"]["seq"],
    )
    [generation] = explanation["generations"]
    assert (generation["generation"], generation["chunks"]) == ("g1", 1)
    for store in ("vectors", "keywords"):
        assert (generation[store]["state"], generation[store]["seq"]) == ("settled", explanation["document"]["seq"])
        assert datetime.fromisoformat(generation[store]["at"]).tzinfo is not None


async def test_why_describes_a_document_pending_in_a_store(library: Library, tenant: str) -> None:
    [id_] = await library.accept(document("a.md", "Some text.", tenant=tenant))
    explanation = await why(library, tenant, "a.md")
    assert explanation["searchable"] is False
    assert "waiting for vectors since" in explanation["reason"]
    assert "waiting for keywords since" in explanation["reason"]
    assert explanation["generations"][0]["vectors"]["state"] == "pending"
    await library.keywords.converge(library.generation, [id_])
    explanation = await why(library, tenant, "a.md")
    assert explanation["searchable"] is False
    assert "waiting for vectors" in explanation["reason"]
    assert "found by keywords only" in explanation["reason"]
    assert explanation["generations"][0]["keywords"]["state"] == "settled"


async def test_why_describes_a_failed_document_and_its_next_retry(library: Library, tenant: str) -> None:
    [id_] = await library.accept(document("a.md", "Some text.", tenant=tenant))
    await library.execute(
        "UPDATE index_state SET attempts = 3, error = 'the row is too big', next_at = now() + interval '1 hour'"
        " WHERE document_id = %s AND store = 'vectors'",
        id_,
    )
    explanation = await why(library, tenant, "a.md")
    vectors = explanation["generations"][0]["vectors"]
    assert (vectors["state"], vectors["attempts"], vectors["error"]) == ("failed", 3, "the row is too big")
    assert datetime.fromisoformat(vectors["next_retry"]) > datetime.fromisoformat(vectors["pending_since"])
    assert "vectors failed 3 times" in explanation["reason"]
    assert "next attempt at" in explanation["reason"]


async def test_why_describes_a_document_with_refused_chunks_as_partial(library: Library, tenant: str) -> None:
    text = "# One\n\n" + "Plain words here. " * 60 + "\n\n# Two\n\n" + "An unspeakable word. " * 60
    await library.put(document("a.md", text, tenant=tenant))
    explanation = await why(library, tenant, "a.md")
    assert explanation["searchable"] is True
    assert explanation["generations"][0]["vectors"]["state"] == "partial"
    assert "can never be embedded" in explanation["reason"]


async def test_why_describes_a_deleted_document(library: Library, tenant: str) -> None:
    one = document("a.md", "Some text.", tenant=tenant)
    await library.put(one)
    await library.put(deletion(one))
    explanation = await why(library, tenant, "a.md")
    assert explanation["searchable"] is False
    assert "it was deleted on" in explanation["reason"]
    assert [e["outcome"] for e in explanation["events"]] == ["created", "deleted"]
    assert explanation["generations"][0]["vectors"]["state"] == "withdrawn"
    assert explanation["generations"][0]["chunks"] == 0


async def test_why_describes_a_document_with_an_empty_access_set(library: Library, tenant: str) -> None:
    one = document("a.md", "Some text.", tenant=tenant)
    await library.put(one)
    await library.put(access(one, []))
    explanation = await why(library, tenant, "a.md")
    assert explanation["searchable"] is False
    assert "nobody may read it" in explanation["reason"]
    assert explanation["access"]["acl_tags"] == []
    assert [explanation["generations"][0][s]["state"] for s in ("vectors", "keywords")] == ["withdrawn", "withdrawn"]


async def test_why_describes_a_document_without_content_and_one_with_empty_text(library: Library, tenant: str) -> None:
    unseen = document("unseen.md", "x", tenant=tenant)
    await library.put(access(unseen, ["staff"]), document("empty.md", "", tenant=tenant))
    stub = await why(library, tenant, "unseen.md")
    assert (stub["searchable"], stub["document"]["version"]) == (False, None)
    assert "only a change of access" in stub["reason"]
    empty = await why(library, tenant, "empty.md")
    assert empty["searchable"] is False
    assert "its text is empty" in empty["reason"]


async def test_the_events_of_a_document_are_in_order_and_limited_in_number(library: Library, tenant: str) -> None:
    for n in range(20):
        await library.accept(document("a.md", f"Text number {n}.", tenant=tenant))
    explanation = await why(library, tenant, "a.md")
    seqs = [event["seq"] for event in explanation["events"]]
    assert len(seqs) == 16
    assert seqs == sorted(seqs)
    assert seqs[-1] == explanation["document"]["seq"]


async def test_why_includes_the_dead_letters_of_a_document(library: Library, tenant: str) -> None:
    await library.put(document("a.md", "Some text.", tenant=tenant))
    await library.make_dead_letter(tenant, "a.md")
    explanation = await why(library, tenant, "a.md")
    [dead] = explanation["dead"]
    assert dead["stage"] == "detect"
    assert explanation["searchable"] is True
    assert "not its newest version" in explanation["reason"]


async def test_why_reads_the_newest_of_very_many_dead_letters(library: Library, tenant: str) -> None:
    """Records that nobody has signed may name a document as often as their sender likes."""
    made = document("a.md", "Text.", tenant=tenant)
    await library.put(made)
    await library.execute(
        'INSERT INTO dead_letters (id, topic, partition, "offset", stage, code, message, first_failed_at, document_id,'
        " at)"
        " SELECT %s || n, 't', 0, n, 'detect', 'unsigned', 'm', now(), %s, now() + n * interval '1 ms'"
        " FROM generate_series(1, %s) n",
        f"{tenant}:0:",
        document_id(tenant, "wiki", "a.md"),
        story.MAX_DEAD_LETTERS + 1,
    )
    explanation = await why(library, tenant, "a.md")
    assert len(explanation["dead"]) == story.MAX_DEAD_LETTERS
    assert [letter["id"].rpartition(":")[2] for letter in explanation["dead"][:2]] == ["2", "3"]

    await library.execute(
        "UPDATE dead_letters SET dismissed_at = now(), dismissed_by = 'ann', dismissed_reason = 'forged'"
        ' WHERE id LIKE %s AND "offset" > 1',
        f"{tenant}:0:%",
    )
    letters = (await why(library, tenant, "a.md"))["dead"]
    assert len(letters) == story.MAX_DEAD_LETTERS
    assert letters[0]["id"] == f"{tenant}:0:1", "it waits, although all others are newer"


async def test_why_finds_a_document_by_id_address_path_or_title(library: Library, tenant: str, tmp_path: Path) -> None:
    file = tmp_path / "notes on ships.md"
    await library.put(
        document(str(file), "Ships.", tenant=tenant, source="folder", title="Ships", source_url=file.as_uri()),
        document("https://wiki/x", "X.", tenant=tenant, title="The X page"),
        document("deep/x", "X.", tenant=tenant, title="Another"),
    )
    id_ = (await why(library, tenant, str(file)))["document"]["id"]
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        for name in (id_, file.as_uri(), file.name, f"./{file.name}", f"folder/{file}", "ships", "on ships.md"):
            assert (await why(library, tenant, name))["document"]["id"] == id_, name
    finally:
        os.chdir(here)
    assert (await why(library, tenant, "the x page"))["document"]["external_id"] == "https://wiki/x"
    async with library.pool.connection() as connection:
        documents = await story.find(connection, tenant, names("/x"))
        assert {identity.external_id for identity, _ in documents} == {"https://wiki/x", "deep/x"}
        assert await story.find(connection, "other", names(id_)) == []
