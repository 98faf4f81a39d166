"""Programs of other people on the whole of Penstock, with its own workers and model: language-model clients that speak
MCP, over stdio and HTTP, and the example of another team's query service."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from pipeline.runtime.home import DEVELOPMENT_FILE
from tests.support.query.http_kit import as_, bearer
from tests.support.query.mcp_kit import call, connected, refused
from tests.support.space import PROJECT, Space, now
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted, IdentityChanged
from topics.registry import IDENTITIES

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

COMMAND = (sys.executable, "-m", "cli.main")
PLACE = {"tenant": "acme", "source": "wiki"}


def page(external_id: str, content: str, *acl_tags: str, version: int = 1) -> DocumentUpserted:
    return DocumentUpserted(
        **PLACE,
        external_id=external_id,
        observed_at=now(),
        version=version,
        title=external_id.removesuffix(".md"),
        content=content,
        media_type="text/markdown",
        acl_tags=list(acl_tags) or ["staff"],
        source_url=f"https://wiki.example.org/{external_id}",
    )


LEAVE = page("leave.md", "Everybody has thirty days of paid holiday a year. Ask your manager before you book a trip.")
TRAVEL = page("travel.md", "Train tickets in second class are paid back within two weeks of the journey.")
SALARY = page("salary.md", "The salary bands of next year, for the board alone.", "board")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def site(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Space]:
    async with Space.create(stack, tmp_path_factory.mktemp("mcp")) as space:
        space.start("detect", "vectors", "keywords")
        await space.publish(
            *(IdentityChanged(**PLACE, observed_at=now(), principal=name, groups=["staff"]) for name in ("ann", "bob")),
            topic=IDENTITIES,
        )
        await space.publish(LEAVE, TRAVEL, SALARY)
        await space.settled([LEAVE, TRAVEL, SALARY])
        yield space


def id_of(document: DocumentUpserted) -> str:
    return str(document_id("acme", "wiki", document.external_id))


async def check(client: Client) -> None:
    """By meaning: no word in common with what is asked."""
    response = await call(client, "search", query="How much vacation do I get?")
    assert response["results"][0]["id"] == id_of(LEAVE)
    assert response["results"][0]["url"] == "https://wiki.example.org/leave.md"
    assert response["notes"] == []
    assert (await call(client, "fetch", id=id_of(LEAVE)))["text"] == LEAVE.content
    assert id_of(SALARY) not in {
        result["id"] for result in (await call(client, "search", query="salary bands"))["results"]
    }
    assert "the document does not exist" in await refused(client, "fetch", id=id_of(SALARY))


@pytest.mark.slow
async def test_an_mcp_client_searches_and_fetches_over_stdio(site: Space) -> None:
    started = StdioServerParameters(
        command=COMMAND[0],
        args=[*COMMAND[1:], "mcp", "--tenant", "acme", "--as", "ann"],
        env=site.environment,
        cwd=PROJECT,
    )
    since = datetime.now(UTC)
    async with Client(started, read_timeout_seconds=60) as client:
        await check(client)
    recorded = await site.query(
        "SELECT action, decision, object, %s = ANY(documents::text[]) FROM trail.records"
        " WHERE access = '{user:ann}' AND at > %s ORDER BY at",
        id_of(LEAVE),
        since,
    )
    assert recorded[:2] == [("mcp.search", "allowed", "", True), ("mcp.fetch", "allowed", "", True)]
    assert [row[:2] for row in recorded[2:]] == [("mcp.search", "allowed"), ("mcp.fetch", "refused")]
    assert recorded[3][2] == f"document:{id_of(SALARY)}"


@pytest.mark.slow
async def test_a_stdio_server_with_a_tag_reads_only_its_documents_and_writes_only_messages(site: Space) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "mcp",
        "--tenant",
        "acme",
        "--tag",
        "wiki/board",
        env=site.environment,
        cwd=PROJECT,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    begin = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    requests = {"name": "fetch", "arguments": {"id": id_of(SALARY)}}
    sent: list[dict[str, Any]] = [
        {"id": 1, "method": "initialize", "params": begin},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": requests},
        {"id": 3, "method": "tools/call", "params": {"name": "fetch", "arguments": {"id": id_of(LEAVE)}}},
    ]
    assert process.stdin is not None
    assert process.stdout is not None
    answers: dict[int, Any] = {}
    for message in sent:
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        await process.stdin.drain()
        if "id" in message:
            output = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))  # every line is a message
            answers[output["id"]] = output["result"]
    out, errors = await asyncio.wait_for(process.communicate(b""), 30)  # closes stdin: so a client says goodbye
    assert (process.returncode, out) == (0, b""), errors.decode()
    assert answers[2]["structuredContent"]["text"] == SALARY.content
    assert answers[3]["isError"] is True


async def test_an_mcp_client_searches_and_fetches_over_http(site: Space) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "serve",
        "--port",
        "0",
        env={**site.environment, "PENSTOCK_SERVE_DEVELOPMENT": "true"},
        cwd=PROJECT,
        stdout=PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[-1]
        headers = as_("ann") | bearer(site.home / DEVELOPMENT_FILE)
        async with connected(address, headers=headers) as client:
            await check(client)
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


# Another team's query service


@asynccontextmanager
async def example_reader(site: Space) -> AsyncIterator[Process]:
    """examples/reader.py, logged in as a member of penstock_reader."""
    name, password = f"team_{secrets.token_hex(4)}", secrets.token_hex(8)
    dsn = site.settings.postgres.dsn.get_secret_value()
    theirs = make_conninfo(**{**conninfo_to_dict(dsn), "user": name, "password": password})
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}' IN ROLE penstock_reader")
        environment = {
            **site.environment,
            "READER_DSN": theirs,
            "ELASTICSEARCH_URL": site.settings.elasticsearch.url,
            "KAFKA_BOOTSTRAP": site.settings.kafka.bootstrap,
            "TENANT": "acme",
            "PYTHONPATH": os.fspath(PROJECT),
            "TOPIC": f"{site.settings.kafka.topic_prefix}documents.indexed.v1",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "examples/reader.py", env=environment, cwd=PROJECT, stdin=PIPE, stdout=PIPE
        )
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            assert await asyncio.wait_for(process.wait(), 30) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            connection.execute(f"DROP ROLE {name}")


async def ask(reader: Process, principal: str, question: str) -> list[str]:
    """The titles, the best first."""
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(f"{principal} {question}\n".encode())
    await reader.stdin.drain()
    return [row["title"] for row in json.loads(await asyncio.wait_for(reader.stdout.readline(), 60))]


async def ask_until_remote(reader: Process, principal: str, question: str) -> list[str]:
    """Ask until the document ``remote`` is among the answers."""
    async with asyncio.timeout(60):
        while "remote" not in (answer := await ask(reader, principal, question)):
            await asyncio.sleep(0.2)
    return answer


@pytest.mark.slow
async def test_the_example_query_service_follows_changes_of_documents_access_and_memberships(site: Space) -> None:
    question, remote = "How much vacation do I get?", page("remote.md", "Vacation days can be spent working abroad.")
    async with example_reader(site) as reader:
        answer = await ask(reader, "ann", question)
        assert answer[0] == "leave"
        assert "salary" not in answer
        assert await ask(reader, "eve", question) == []
        assert await ask(reader, "bob", question) == answer

        await site.publish(remote)  # what became searchable is announced: the remembered answer is worth nothing now
        assert "leave" in await ask_until_remote(reader, "ann", question)

        narrowed = AccessChanged(
            **PLACE, external_id="remote.md", observed_at=now(), acl_tags=["user:bob"], required_tags=[]
        )
        await site.publish(narrowed)
        await site.settled([narrowed])
        assert "remote" not in await ask(reader, "ann", question)
        assert "remote" in await ask_until_remote(reader, "bob", question)

        gone = DocumentDeleted(**PLACE, external_id="remote.md", observed_at=now(), version=2)
        await site.publish(gone)
        await site.settled([gone])
        assert "remote" not in await ask(reader, "bob", question)

        left = IdentityChanged(**PLACE, observed_at=now(), principal="bob", groups=[])
        await site.publish(left, topic=IDENTITIES)
        async with asyncio.timeout(60):
            while await ask(reader, "bob", question):
                await asyncio.sleep(0.2)
        assert await ask(reader, "ann", question) == answer
