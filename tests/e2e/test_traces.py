"""Traces of the whole of Penstock, its own processes, as a collector receives them: a document from its source to both
stores, and questions over HTTP and MCP. Nothing of what was said leaves the house with them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from connectors.fakes.notes import SECRET, TOKEN, Note, NotesPlayground, NotesService, app
from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from pipeline.kafka.stopping import stop_consumer
from pipeline.runtime.home import DEVELOPMENT_FILE
from pipeline.runtime.http_server import served
from tests.fakes.chat import FakeChat
from tests.fakes.collector import CollectedSpan, FakeCollector
from tests.fakes.server import serving as embedding_server
from tests.support.processes import serving
from tests.support.query.http_kit import bearer
from tests.support.query.mcp_kit import WAY_IN
from tests.support.space import Space
from tests.support.waiting import until
from topics.registry import DEAD_LETTERS, DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, INDEX_BACKFILL, INDEX_LIVE

pytestmark = [pytest.mark.stack, pytest.mark.slow]

TITLE, TEXT, QUESTION, NAME = (f"{word}-{secrets.token_hex(6)}" for word in ("title", "text", "asked", "name"))
"""Words that only a document, its name or a question holds."""
ASKS = {"X-Penstock-As": NotesPlayground.inside, "X-Penstock-Tenant": "default"}


@dataclass
class House:
    space: Space
    notes: NotesService
    collector: FakeCollector
    chat: FakeChat

    def write(self, name: str, text: str) -> str:
        """A note; its document's id."""
        self.notes.writes += 1
        self.notes.notes[name] = Note(name, "book", f"A note on {TITLE}", text, self.notes.writes)
        self.notes.record_change(name)
        return str(document_id("default", "notes", name))

    until = staticmethod(until)

    async def searchable(self, name: str) -> None:
        statement = (
            "SELECT count(*) FROM documents d JOIN index_state s ON s.document_id = d.id"
            " WHERE d.external_id = %s AND s.seq >= s.want_seq AND d.version IS NOT NULL"
        )
        async with asyncio.timeout(90):
            while (await self.space.query(statement, name)) != [(2,)]:
                await asyncio.sleep(0.1)


@pytest.fixture
async def house(stack: Stack, tmp_path: Path) -> AsyncIterator[House]:
    async with AsyncExitStack() as opened:
        model = await opened.enter_async_context(embedding_server())
        embedding = {"provider": "openai", "base_url": model.url, "model": "text-embedding-3-large", "dimensions": 64}
        space = await opened.enter_async_context(Space.create(stack, tmp_path, embedding=embedding))
        notes = NotesService()
        url = await opened.enter_async_context(served(app(notes)))
        collector = await opened.enter_async_context(FakeCollector())
        chat = await opened.enter_async_context(FakeChat())
        file = tmp_path / "connectors.toml"
        file.write_text(
            f'[connector.notes]\nkind = "examples.notes:Notes"\nurl = "{url}"\npoll_seconds = 1\n'
            "sweep_seconds = 9000\ngroups_seconds = 9000\n"
        )
        space.environment |= {
            "PENSTOCK_NOTES_TOKEN": TOKEN,
            "PENSTOCK_NOTES_SECRET": SECRET,
            "PENSTOCK_CONNECTORS_FILE": str(file),
            "PENSTOCK_SERVE_DEVELOPMENT": "true",
            "PENSTOCK_CHAT_BASE_URL": chat.url,
            "PENSTOCK_CHAT_MODEL": chat.model,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        yield House(space, notes, collector, chat)


@asynccontextmanager
async def query_client(space: Space) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the query service, whose log is where the workers' logs are."""
    with (space.home / "query.log").open("wb") as log:
        async with serving(space.environment, log) as (address, process):
            headers = ASKS | bearer(space.home / DEVELOPMENT_FILE)
            async with httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as client:
                yield client
    assert process.returncode == 0


async def records(space: Space) -> list[tuple[str, dict[str, bytes]]]:
    """(topic, headers) of everything on the topics that documents pass."""
    names = [
        space.settings.kafka.topic_prefix + topic.name
        for topic in (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, INDEX_LIVE, INDEX_BACKFILL, DEAD_LETTERS)
    ]
    consumer = AIOKafkaConsumer(
        *names, bootstrap_servers=space.settings.kafka.bootstrap, auto_offset_reset="earliest", group_id=None
    )
    await consumer.start()
    try:
        results = []
        while batch := await consumer.getmany(timeout_ms=1500):
            results += [(record.topic, dict(record.headers)) for some in batch.values() for record in some]
        return results
    finally:
        await stop_consumer(consumer)


async def assert_ancestors(house: House, span: CollectedSpan, *names: str) -> None:
    """Its parent, that one's parent …, by name, up to the beginning of the trace. What ends later arrives later."""
    await house.until(lambda: [above.name for above in house.collector.above(span)] == list(names))
    assert house.collector.above(span)[-1].parent == ""


async def test_a_document_and_each_request_have_one_trace_without_any_content(house: House) -> None:
    space, collector = house.space, house.collector
    at = space.settings.kafka.topic_prefix
    document = house.write(NAME, f"The otter is called {TEXT}.")
    space.start("detect", "vectors", "keywords", "connectors")
    await house.searchable(NAME)

    # One trace from the connector to both stores
    def stored() -> list[CollectedSpan]:
        return collector.named(f"send {at}documents.indexed.v1", penstock_document_id=document)

    await house.until(stored)
    [begun] = [s for s in collector.spans if s.name == f"send {at}documents.backfill.v1" and s.parent == ""]
    assert begun.service == "penstock-connectors"
    assert begun.has(penstock_document_id=document, penstock_source="notes", penstock_tenant="default")
    await house.until(
        lambda: {"penstock-vectors", "penstock-keywords"} <= {s.service for s in collector.of(begun.trace)}
    )
    detected, hinted = f"process {at}documents.backfill.v1", f"process {at}index.backfill.v1"
    line = (hinted, f"send {at}index.backfill.v1", detected, f"send {at}documents.backfill.v1")
    await house.until(lambda: [s for s in collector.of(begun.trace) if s.name.startswith("bulk ")])
    await house.until(lambda: [s for s in collector.of(begun.trace) if s.name.startswith("INSERT ")])
    trace = {span.name.partition(" ")[0]: span for span in collector.of(begun.trace)}
    await assert_ancestors(house, trace["embeddings"], *line)
    await assert_ancestors(house, trace["INSERT"], *line)
    await assert_ancestors(house, trace["bulk"], *line)
    assert {trace[name].service for name in ("embeddings", "INSERT")} == {"penstock-vectors"}
    assert trace["bulk"].service == "penstock-keywords"
    assert trace["embeddings"].attributes["gen_ai.usage.input_tokens"] > 0
    assert trace["embeddings"].attributes["penstock.bytes_sent"] > 0
    assert trace["bulk"].attributes["db.operation.batch.size"] == 1
    assert [s.attributes["penstock.outcome"] for s in collector.of(begun.trace) if s.name == detected] == ["created"]
    await house.until(lambda: [s for s in collector.spans if (s.trace, s.id) in begun.links])
    [page] = [s for s in collector.spans if (s.trace, s.id) in begun.links]
    assert (page.name, page.parent) == ("publish", "")
    assert any(s.name == "GET notes" and s.attributes["http.response.status_code"] == 200 for s in collector.spans)

    # An event that cannot be read: its dead letter is in the trace that its header names
    theirs, parent = secrets.token_hex(16), secrets.token_hex(8)
    raw = AIOKafkaProducer(bootstrap_servers=space.settings.kafka.bootstrap)
    await raw.start()
    header = [("ce_type", b"io.penstock.document.upserted.v1"), ("traceparent", f"00-{theirs}-{parent}-01".encode())]
    await raw.send_and_wait(
        f"{at}documents.live.v1", json.dumps({"content": TEXT}).encode(), b"default/notes/x", headers=header
    )
    await raw.stop()
    await house.until(lambda: [s for s in collector.of(theirs) if s.name == "dead letter"])
    [letter] = [s for s in collector.of(theirs) if s.name == "dead letter"]
    assert letter.attributes["penstock.dead_letter.code"] == "invalid"
    await house.until(lambda: [s.name for s in collector.above(letter)] == [f"process {at}documents.live.v1"])
    assert collector.above(letter)[0].parent == parent

    # A question through both stores, in the caller's trace; an answer; a tool of a language model's client
    async with query_client(space) as client:
        mine = secrets.token_hex(16)
        answer = await client.post(
            "/v1/search",
            json={"query": f"what is the otter {QUESTION} called"},
            headers={"traceparent": f"00-{mine}-{parent}-01"},
        )
        assert [result["external_id"] for result in answer.json()["results"]] == [NAME]
        assert answer.headers["trace-id"] == mine
        written = await client.post(
            "/v1/answers", json={"question": f"What is the otter called, {QUESTION}?", "mode": "hybrid"}
        )
        assert written.json()["model"] == house.chat.model
        streamed = await client.post("/v1/answers", json={"question": f"Is the otter {QUESTION}?", "stream": True})
        assert "event: done" in streamed.text
        called = await client.post(
            "/mcp",
            headers=WAY_IN,
            json={
                "jsonrpc": "2.0",
                "id": 1,
                "method": "tools/call",
                "params": {"name": "search", "arguments": {"query": f"otter {QUESTION}"}},
            },
        )
        assert NAME in called.text or document in called.text
        answers = {"answer": written, "stream": streamed, "tool": called}
        trace_ids = {"search": mine, **{name: answer.headers["trace-id"] for name, answer in answers.items()}}
        spent = (await client.get("/metrics")).text
    assert len(set(trace_ids.values())) == 4
    assert re.search(r"^penstock_query_embedding_tokens_total [1-9]", spent, re.MULTILINE)
    assert re.search(r'^penstock_query_tokens_total\{kind="answer",model="copyist"\} [1-9]', spent, re.MULTILINE)
    [request] = [s for s in collector.of(mine) if s.kind == "server"]
    assert (request.name, request.parent, request.service) == ("POST /v1/search", parent, "penstock-query")
    assert request.has(http_response_status_code=200, penstock_tenant="default")
    steps = {s.name: s for s in collector.of(mine) if s.parent == request.id}
    assert {"access", "embed", "vectors", "keywords", "verify", "arrange"} <= set(steps)
    assert [steps[name].attributes["db.system.name"] for name in ("vectors", "keywords")] == [
        "postgresql",
        "elasticsearch",
    ]
    [embedded] = [s for s in collector.of(mine) if s.name.startswith("embeddings ")]
    assert embedded.parent == steps["embed"].id
    assert {"POST /v1/answers", "access", "vectors", "keywords", "chat", "chat copyist"} <= {
        s.name for s in collector.of(trace_ids["answer"])
    }
    [wrote] = [s for s in collector.of(trace_ids["answer"]) if s.name == "chat copyist"]
    assert wrote.attributes["gen_ai.usage.output_tokens"] > 0
    assert [above.name for above in collector.above(wrote)] == ["chat", "POST /v1/answers"]
    [wrote] = [s for s in collector.of(trace_ids["stream"]) if s.name == "chat copyist"]
    assert [above.name for above in collector.above(wrote)] == ["chat", "POST /v1/answers"]
    for store in ("vectors", "keywords"):
        lines_up = [
            [above.name for above in collector.above(s)] for s in collector.of(trace_ids["tool"]) if s.name == store
        ]
        assert ["tools/call search", "POST /mcp"] in lines_up

    # Every record carries its context, and nothing carries what was said
    sent = await records(space)
    assert sent
    assert all("traceparent" in headers for _, headers in sent)
    assert {headers["traceparent"].decode()[3:35] for _, headers in sent if "traceparent" in headers} >= {begun.trace}
    logs = {path.stem: path.read_text() for path in space.home.glob("*.log")}
    assert set(logs) == {"detect", "vectors", "keywords", "connectors", "query"}
    lines = [json.loads(line) for log in logs.values() for line in log.splitlines()]
    assert {line["trace_id"] for line in lines if line["event"] == "request_handled"} >= set(trace_ids.values())
    places = {
        "spans": b"".join(collector.raw),
        "headers": repr([headers for _, headers in sent]).encode(),
        "logs": "".join(logs.values()).encode(),
    }
    for where, bytes_ in places.items():
        for word in (TITLE, TEXT, QUESTION, NAME, NotesPlayground.inside):
            assert word.encode() not in bytes_, f"{word} is in {where}"
    assert document.encode() in places["spans"]  # the search itself can find
    digest = hashlib.sha256(TEXT.encode()).hexdigest().encode()
    assert digest not in places["spans"]

    # A collector that takes everything and answers nothing holds up neither work nor stop
    collector.faults.hang = 1_000_000
    house.write("second", "The second note is about a beaver.")
    await house.searchable("second")
    assert [space.stop(name) for name in ("detect", "vectors", "keywords", "connectors")] == [0, 0, 0, 0]
