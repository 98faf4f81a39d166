"""Revoked or deleted means gone at the next query, however long the embedding queue is: real workers, a slow model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from pipeline.embedding.port import Embedded, Vectors
from query.embedding.embedders import QueryEmbedder
from query.model import MODES, Mode
from query.retrieval.search import Search, open_search
from tests.e2e.test_stream import changed, document
from tests.fakes.openai import FakeOpenAI
from tests.support.space import PROJECT, Space, now
from topics.messages import AccessChanged, AnyMessage, DocumentDeleted, DocumentUpserted, IdentityChanged
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, IDENTITIES

DIMENSIONS = 64
QUEUED = 10_000
DOCUMENTS = 600
SENTENCES = 10
"""The number of sentences of a document; with chunks of 32 tokens, each sentence is about two chunks."""
LATENCY_SECONDS = 2.0
"""The duration of one request to the model, which holds up to 200 chunks: the queue takes about a minute."""
WITHIN_SECONDS = 30.0
"""Most time from publishing to invisible that a machine shared with others may take; alone it is well under one."""


@dataclass
class Model:
    """The fake of OpenAI as a process, and its vectors for queries, without its latency."""

    url: str
    model = "text-embedding-3-large"
    revision = ""
    dimensions = DIMENSIONS
    input_window = 8191
    document_prefix = ""
    query_prefix = ""

    def slow(self, seconds: float) -> None:
        body = json.dumps({"latency_seconds": seconds}).encode()
        url = self.url.removesuffix("/v1") + "/_faults"
        headers = {"content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10).close()

    async def embed_query(self, text: str) -> Vectors:
        return FakeOpenAI().vector(text, DIMENSIONS)

    async def embed_documents(self, texts: object) -> Embedded:
        raise NotImplementedError

    def count_tokens(self, texts: object) -> list[int]:
        raise NotImplementedError

    async def aclose(self) -> None:
        pass


@pytest.fixture
def model() -> Iterator[Model]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.openai"], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    ) as fake:
        assert fake.stdout is not None
        try:
            yield Model(json.loads(fake.stdout.readline())["url"])
        finally:
            fake.terminate()


@pytest.fixture
async def slow_space(
    stack: Stack, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Space]:
    for name, value in {
        "PROVIDER": "openai",
        "BASE_URL": model.url,
        "API_KEY": "none",
        "DIMENSIONS": DIMENSIONS,
        "CHUNK_TOKENS": 32,
    }.items():
        monkeypatch.setenv(f"PENSTOCK_EMBEDDING_{name}", str(value))
    async with Space.create(stack, tmp_path) as space:
        yield space


def long(n: int) -> DocumentUpserted:
    text = "\n\n".join(
        f"Sentence {m} of volume {n} tells of archive matter {n * 7919 + m * 104729} at its usual length and says"
        f" little else that anybody at the pier would want to remember of it afterwards."
        for m in range(SENTENCES)
    )
    return document(f"volume-{n}.md", text, acl_tags=["archive"])


async def waiting(space: Space) -> int:
    """Chunks that wait for embedding: wanted by the ledger and not in the table."""
    [(expected,)] = await space.query(
        "SELECT coalesce(sum(cardinality(m.chunk_ids)), 0)::bigint FROM manifests m JOIN index_state s"
        " USING (document_id, generation) WHERE s.store = 'vectors' AND s.seq < s.want_seq"
    )
    return int(expected)


async def test_revocations_and_deletes_apply_at_the_next_query_despite_a_long_embedding_queue(
    slow_space: Space, model: Model
) -> None:
    space = slow_space
    space.start("detect", "keywords", "vectors")
    names = ("revoked", "deleted", "left", "kept", "narrowed")
    known = {n: document(f"{n}.md", f"The {n} harbour plan.", acl_tags=["team"]) for n in names}
    known["left"] = changed(known["left"], acl_tags=["crew"])
    member = IdentityChanged(tenant="acme", source="wiki", principal="ann", groups=["team", "crew"], observed_at=now())
    await space.publish(member, topic=IDENTITIES)
    await space.publish(*known.values())
    await space.settled(known.values())
    assert space.stop("vectors") == 0

    backlog = [long(n) for n in range(DOCUMENTS)]
    await space.publish(*backlog, topic=DOCUMENTS_BACKFILL)
    await space.until(f"SELECT count(*) >= {DOCUMENTS} FROM documents WHERE external_id LIKE 'volume-%%'")
    queued = await waiting(space)
    assert queued >= QUEUED
    model.slow(LATENCY_SECONDS)
    space.start("vectors", env={"PENSTOCK_STREAM_BATCH_SIZE": "8"})
    await space.until("SELECT count(*) > 5 FROM chunks_g1")

    async with open_search(space.settings, QueryEmbedder(lambda: model)) as search:
        assert await visible(search) == in_every_mode(known)
        for name, message, accepted in (
            ("revoked", access(known["revoked"], ["board"]), "access_observed_at >= %s"),
            ("narrowed", access(known["narrowed"], ["team"], ["nda"]), "access_observed_at >= %s"),
            ("deleted", deleted(known["deleted"]), "deleted_floor >= %s"),
        ):
            statement = f"SELECT {accepted} FROM documents WHERE external_id = '{name}.md'"
            await gone(space, search, name, message, statement)
        without = member.model_copy(update={"groups": ["team"], "observed_at": now()})
        await gone(space, search, "left", without, "SELECT observed_at >= %s FROM memberships")
        assert await visible(search) == in_every_mode(["kept"])

        left = await waiting(space)
        assert left >= QUEUED // 2, "the queue is to be long all the while"
        print(f"{queued} chunks waited when the model became slow, {left} at the last of these queries")

        fresh = document("fresh.md", "A fresh harbour plan.", acl_tags=["team"])
        start = time.monotonic()
        await space.publish(fresh)
        await space.settled([fresh], within_seconds=60)
        assert await visible(search) == in_every_mode(["kept", "fresh"])
        print(f"fresh: in both stores after {time.monotonic() - start:.1f} s, {await waiting(space)} chunks waiting")
        assert await waiting(space) >= 1000, "live work does not wait behind backfill"


def access(of: DocumentUpserted, acl: list[str], required: list[str] | None = None) -> AccessChanged:
    return AccessChanged(
        tenant=of.tenant,
        source=of.source,
        external_id=of.external_id,
        observed_at=now(),
        acl_tags=acl,
        required_tags=required or [],
    )


def deleted(of: DocumentUpserted) -> DocumentDeleted:
    return DocumentDeleted(
        tenant=of.tenant, source=of.source, external_id=of.external_id, observed_at=now(), version=of.version
    )


async def gone(space: Space, search: Search, name: str, message: AnyMessage, accepted: str) -> None:
    """Publish; at the first query after the ledger accepted it, the document is nowhere, and others still are."""
    start = time.monotonic()
    topic = IDENTITIES if isinstance(message, IdentityChanged) else DOCUMENTS_LIVE
    await space.publish(message, topic=topic)
    delivered = time.monotonic() - start
    while True:
        assert time.monotonic() - start < WITHIN_SECONDS, f"{name}: still not accepted"
        [(known,)] = await space.query(accepted, message.observed_at)
        answers = await visible(search)
        if known:
            break
        await asyncio.sleep(0.02)
    assert not any(name in seen for seen in answers.values()), answers
    assert all("kept" in seen for seen in answers.values()), answers
    print(f"{name}: delivered after {delivered:.2f} s, invisible after {time.monotonic() - start:.2f} s")


async def visible(search: Search) -> dict[Mode, set[str]]:
    """Return the documents that ann finds in each mode. Only shown documents are counted."""
    answers = {}
    for mode in MODES:
        caller = await search.identify("acme", principals=["ann"])
        response = await search.search("harbour plan", caller, mode=mode, top=100)
        assert response.degraded == ()
        counted = [s for s in response.steps if s.name in ("vectors", "keywords", "fuse", "arrange")]
        counts = {s.name: n for s in counted for n in s.facts.values()}
        assert set(counts.values()) <= {len(response.results)}, counts
        answers[mode] = {r.passage.external_id.removesuffix(".md") for r in response.results}
    return answers


def in_every_mode(names: Iterable[str]) -> dict[Mode, set[str]]:
    return {mode: set(names) for mode in MODES}
