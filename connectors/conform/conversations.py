"""The laws of the conversations API. There is no source to crawl, so they are tested from outside, by HTTP and Kafka.

Each law has tenants of its own, which are deleted afterwards; the detect worker of the running stack processes the
messages.
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
QUESTION_TIME = datetime(2026, 1, 5, 9, tzinfo=UTC)
LAST_QUESTION = "again"
"""A pair that is sent last: when it is stored, everything before it was handled, because one member's messages keep
their order."""


@dataclass
class ConversationApi:
    """The conversations API on a port of its own, two tenants with a key each, and access to the tables."""

    http: httpx.AsyncClient
    pool: Pool
    kafka: Producer
    tenant: str
    other: str

    def headers(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    async def post(self, *questions: str, key: str = "ours", conversation: str = "first") -> None:
        pairs = [pair(question).model_dump(mode="json") for question in questions]
        answer = await self.http.post(
            "/v1/conversations",
            json={"member": MEMBER, "conversation": conversation, "pairs": pairs},
            headers=self.headers(key),
        )
        require(answer.status_code == 202, f"posting pairs returned status {answer.status_code}")

    async def forget(self) -> datetime:
        answer = await self.http.delete(f"/v1/conversations/{MEMBER}", headers=self.headers("ours"))
        require(answer.status_code == 202, f"forgetting returned status {answer.status_code}")
        return datetime.fromisoformat(answer.json()["forgotten_until"])

    async def questions(self, tenant: str | None = None) -> set[str]:
        """Return the stored questions of a tenant."""
        return set(
            await self._column("SELECT question FROM conversation_pairs WHERE tenant = %s", tenant or self.tenant)
        )

    async def wait_for(self, expected: set[str], what: str, tenant: str | None = None) -> None:
        """Wait until exactly these questions are stored. Raises Broken."""
        deadline = monotonic() + PATIENCE_SECONDS
        while (pairs := await self.questions(tenant)) != expected:
            require(monotonic() < deadline, f"{what}: {len(pairs)} pairs are stored instead of {len(expected)}")
            await asyncio.sleep(0.05)

    async def count_rows(self) -> int:
        """Count the tenant's rows in all tables of conversations."""
        tables = ("conversation_pairs", "conversation_mentions", "conversation_chunks", "conversation_members")
        total = 0
        for table in tables:
            [count] = await self._column(f"SELECT count(*) FROM {table} WHERE tenant = %s", self.tenant)  # noqa: S608 — names listed here
            total += int(count)
        return total

    async def _column(self, statement: str, tenant: str) -> list[Any]:
        with translated("Postgres"):
            async with self.pool.connection() as connection:
                rows = await (await connection.execute(statement.encode(), [tenant])).fetchall()
        return [value for (value,) in rows]


def pair(question: str) -> Pair:
    return Pair(
        question=question, answer=f"That {question} is so.", asked_at=QUESTION_TIME + timedelta(days=len(question))
    )


def require(holds: bool, why: str) -> None:
    if not holds:
        raise Broken(why)


async def taken(api: ConversationApi) -> str:
    """Posted pairs are stored."""
    await api.post("one", "two")
    await api.wait_for({"one", "two"}, "after two pairs were posted")
    return "2 pairs posted, 2 stored"


async def twice(api: ConversationApi) -> str:
    """Pairs that are posted twice are stored once."""
    for _ in range(2):
        await api.post("one", "two")
    await api.post(LAST_QUESTION)
    await api.wait_for({"one", "two", LAST_QUESTION}, "after the same pairs were posted twice")
    [mentions] = await api._column("SELECT count(*) FROM conversation_mentions WHERE tenant = %s", api.tenant)
    require(mentions == 3, f"3 pairs have {mentions} mentions")
    return "pairs that are posted twice are stored once"


async def forgotten(api: ConversationApi) -> str:
    """No row is left of a member who is forgotten."""
    await api.post("one", "two")
    await api.wait_for({"one", "two"}, "after two pairs were posted")
    await api.forget()
    await api.wait_for(set(), "after the member was forgotten")
    left = await api.count_rows()
    require(left == 0, f"{left} rows of the forgotten member are left")
    return "no row is left of a member who is forgotten"


async def late(api: ConversationApi) -> str:
    """A message from before the deletion that arrives after it changes nothing."""
    until = await api.forget()
    message = ConversationRecorded(
        tenant=api.tenant,
        source="conversations",
        observed_at=until - timedelta(seconds=1),
        member=MEMBER,
        conversation="first",
        pairs=[pair("one")],
    )
    await deliver([api.kafka.send(CONVERSATIONS, message)], within_seconds=30)
    await api.post(LAST_QUESTION)
    await api.wait_for({LAST_QUESTION}, "after a message from before the deletion arrived late")
    return "a message that is older than the deletion changes nothing"


async def apart(api: ConversationApi) -> str:
    """Members of the same name in two tenants are two members."""
    await api.post("one")
    await api.post("two", key="theirs")
    await api.wait_for({"one"}, "one tenant's pairs")
    await api.wait_for({"two"}, "the other tenant's pairs of a member of the same name", api.other)
    return "members of the same name in two tenants are two members"


async def refused(api: ConversationApi) -> str:
    """Requests without a valid key, for another tenant or without pairs are refused, and nothing of them is stored."""
    body = {"member": MEMBER, "conversation": "first", "pairs": [pair("one").model_dump(mode="json")]}
    cases = {
        "without a key": ({}, body, 401),
        "with an unknown key": (api.headers("nobody's"), body, 401),
        "with a key for uploads": (api.headers("uploads"), body, 403),
        "naming a tenant": (api.headers("ours"), {**body, "tenant": api.other}, 422),
        "without pairs": (api.headers("ours"), {**body, "pairs": []}, 422),
    }
    for case, (headers, sent, status) in cases.items():
        answer = await api.http.post("/v1/conversations", json=sent, headers=headers)
        require(answer.status_code == status, f"a request {case} returned status {answer.status_code}, not {status}")
    await api.post(LAST_QUESTION)
    await api.wait_for({LAST_QUESTION}, "after requests that were refused")
    return f"{len(cases)} kinds of requests are refused, and nothing of them is stored"


ConversationLaw = Callable[[ConversationApi], Awaitable[str]]
LAWS: dict[str, ConversationLaw] = {
    "taken": taken,
    "twice": twice,
    "forgotten": forgotten,
    "late": late,
    "apart": apart,
    "refused": refused,
}


@asynccontextmanager
async def serve_api(pool: Pool, kafka: Producer) -> AsyncIterator[ConversationApi]:
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
            yield ConversationApi(http, pool, kafka, tenant, other)
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
