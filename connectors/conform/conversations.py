"""The laws of the conversations' way in. No source is crawled here, so they are tried from outside, by HTTP and Kafka.

A tenant of its own, thrown away afterwards; the running stack's detect worker takes in what is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import httpx
from fastapi import FastAPI

from connectors.conform.trial import PATIENCE_SECONDS, Broken
from connectors.conversations import router
from connectors.declared import Key
from connectors.http import Bodies, tenant_for
from pipeline.kafka.client import deliver
from pipeline.kafka.producer import Producer
from pipeline.runtime.http_server import KeyedLimit, served
from pipeline.stores.postgres import Pool, translated
from topics.messages import ConversationRecorded, Pair
from topics.registry import CONVERSATIONS

MEMBER = "ann@acme.example"
ASKED_AT = datetime(2026, 1, 5, 9, tzinfo=UTC)
NOW_AND_THEN = "again"
"""A pair sent last: once it is there, everything before it was handled (one member's messages keep their order)."""


@dataclass
class Desk:
    """Two tenants with a key each, the way in served on a port of its own, and what the tables hold."""

    http: httpx.AsyncClient
    pool: Pool
    kafka: Producer
    tenant: str
    other: str

    def headers(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    async def say(self, *questions: str, key: str = "ours", conversation: str = "first") -> None:
        pairs = [pair(question).model_dump(mode="json") for question in questions]
        answer = await self.http.post(
            "/v1/conversations",
            json={"member": MEMBER, "conversation": conversation, "pairs": pairs},
            headers=self.headers(key),
        )
        require(answer.status_code == 202, f"posting pairs was answered with {answer.status_code}")

    async def forget(self) -> datetime:
        answer = await self.http.delete(f"/v1/conversations/{MEMBER}", headers=self.headers("ours"))
        require(answer.status_code == 202, f"forgetting was answered with {answer.status_code}")
        return datetime.fromisoformat(answer.json()["forgotten_until"])

    async def holds(self, tenant: str | None = None) -> set[str]:
        return set(
            await self._column("SELECT question FROM conversation_pairs WHERE tenant = %s", tenant or self.tenant)
        )

    async def becomes(self, wanted: set[str], what: str, tenant: str | None = None) -> None:
        deadline = monotonic() + PATIENCE_SECONDS
        while (found := await self.holds(tenant)) != wanted:
            require(monotonic() < deadline, f"{what}: {len(found)} pairs stand where {len(wanted)} should")
            await asyncio.sleep(0.05)

    async def traces(self) -> int:
        """Rows that hold anything of what was said."""
        tables = ("conversation_pairs", "conversation_mentions", "conversation_chunks", "conversation_members")
        counts = [await self._column(f"SELECT count(*) FROM {one} WHERE tenant = %s", self.tenant) for one in tables]  # noqa: S608 — names listed here
        return sum(int(count) for [count] in counts)

    async def _column(self, statement: str, tenant: str) -> list[Any]:
        with translated("Postgres"):
            async with self.pool.connection() as connection:
                rows = await (await connection.execute(statement.encode(), [tenant])).fetchall()
        return [value for (value,) in rows]


def pair(question: str) -> Pair:
    return Pair(question=question, answer=f"That {question} is so.", asked_at=ASKED_AT + timedelta(days=len(question)))


def require(holds: bool, why: str) -> None:
    if not holds:
        raise Broken(why)


async def taken(desk: Desk) -> str:
    await desk.say("one", "two")
    await desk.becomes({"one", "two"}, "after two pairs were posted")
    return "2 pairs posted, 2 stand"


async def twice(desk: Desk) -> str:
    for _ in range(2):
        await desk.say("one", "two")
    await desk.say(NOW_AND_THEN)
    await desk.becomes({"one", "two", NOW_AND_THEN}, "after the same was posted twice")
    [mentions] = await desk._column("SELECT count(*) FROM conversation_mentions WHERE tenant = %s", desk.tenant)
    require(mentions == 3, f"3 pairs have {mentions} mentions")
    return "the same posted twice is one"


async def forgotten(desk: Desk) -> str:
    await desk.say("one", "two")
    await desk.becomes({"one", "two"}, "after two pairs were posted")
    await desk.forget()
    await desk.becomes(set(), "after the member was forgotten")
    left = await desk.traces()
    require(left == 0, f"{left} rows of the forgotten member are left")
    return "no row is left of a member who is forgotten"


async def late(desk: Desk) -> str:
    """What was said before the forgetting and arrives after it."""
    until = await desk.forget()
    message = ConversationRecorded(
        tenant=desk.tenant,
        source="conversations",
        observed_at=until - timedelta(seconds=1),
        member=MEMBER,
        conversation="first",
        pairs=[pair("one")],
    )
    await deliver([desk.kafka.send(CONVERSATIONS, message)], within_seconds=30)
    await desk.say(NOW_AND_THEN)
    await desk.becomes({NOW_AND_THEN}, "after an older message came later than the forgetting")
    return "what is older than the forgetting does not come back"


async def apart(desk: Desk) -> str:
    await desk.say("one")
    await desk.say("two", key="theirs")
    await desk.becomes({"one"}, "one tenant's pairs")
    await desk.becomes({"two"}, "the other tenant's pairs of a member of the same name", desk.other)
    return "two tenants' members of one name are two"


async def refused(desk: Desk) -> str:
    body = {"member": MEMBER, "conversation": "first", "pairs": [pair("one").model_dump(mode="json")]}
    cases = {
        "without a key": ({}, body, 401),
        "with an unknown key": (desk.headers("nobody's"), body, 401),
        "with a key for uploads": (desk.headers("uploads"), body, 403),
        "naming a tenant": (desk.headers("ours"), {**body, "tenant": desk.other}, 422),
        "without pairs": (desk.headers("ours"), {**body, "pairs": []}, 422),
    }
    for case, (headers, sent, status) in cases.items():
        answer = await desk.http.post("/v1/conversations", json=sent, headers=headers)
        require(answer.status_code == status, f"a request {case} was answered with {answer.status_code}, not {status}")
    await desk.say(NOW_AND_THEN)
    await desk.becomes({NOW_AND_THEN}, "after requests that were refused")
    return f"{len(cases)} kinds of requests are refused, and nothing of them stands"


ConversationLaw = Callable[[Desk], Awaitable[str]]
LAWS: dict[str, ConversationLaw] = {
    "taken": taken,
    "twice": twice,
    "forgotten": forgotten,
    "late": late,
    "apart": apart,
    "refused": refused,
}


@asynccontextmanager
async def desk(pool: Pool, kafka: Producer) -> AsyncIterator[Desk]:
    name = uuid.uuid4().hex[:12]
    tenant, other = f"conform-{name}", f"conform-{name}-other"
    expires = datetime.now(UTC) + timedelta(days=1)
    keys = {
        "ours": Key(sha256=_digest("ours"), expires=expires, tenant=tenant, may=frozenset({"conversations"})),
        "theirs": Key(sha256=_digest("theirs"), expires=expires, tenant=other, may=frozenset({"conversations"})),
        "uploads": Key(sha256=_digest("uploads"), expires=expires, tenant=tenant, may=frozenset({"uploads"})),
    }
    app = FastAPI(openapi_url=None)
    app.include_router(router(kafka, tenant_for("conversations", keys), Bodies(KeyedLimit(2**26, 2**24), lambda: None)))
    async with served(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        try:
            yield Desk(http, pool, kafka, tenant, other)
        finally:
            await _clear(pool, tenant, other)


async def _clear(pool: Pool, *tenants: str) -> None:
    tables = ("chunks", "mentions", "pairs", "floors", "members")
    with translated("Postgres"):
        async with pool.connection() as connection:
            for table in tables:
                statement = f"DELETE FROM conversation_{table} WHERE tenant = ANY(%s)"  # noqa: S608 — names listed here
                await connection.execute(statement.encode(), [list(tenants)])


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
