"""Documents that a caller may not read change nothing that it receives.

Every route and tool is asked the same before and after such documents exist, in the caller's tenant and in another one,
by somebody who knows all of their names and ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from pipeline.core import publication
from pipeline.core.identity import document_id
from pipeline.ledger import metadata_keys
from query.evaluation import golden
from query.evaluation.golden import Golden, Judged
from tests.support.query.http_kit import FEEDBACK, World, as_, service_over
from tests.support.query.library import Event, access, deletion, document
from tests.support.query.mcp_kit import WAY_IN
from topics.messages import IdentityChanged

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

OWN = {
    "dam.md": "The reservoir of the dam feeds four turbines in the hall.",
    "tea.md": "Boil the water for tea before the dam opens.",
    "hall.md": "The hall of the dam has a crane of nine tons.",
    "boat.md": "A boat crosses the reservoir twice a day.",
}
SECRET = "The reservoir of the dam feeds five turbines, says PROJ-4821 of zanzibar."
CONFLICTS = [uuid4() for _ in range(5)]
VOLATILE = re.compile(r"(?:^|_)(?:ms|at|id)$|^cursor$")
"""Fields that differ between two equal requests: durations, times, and ids that are drawn."""
BY_WORDS = frozenset({"score", "ranks", "n", "answer", "sentences"})
"""Fields that follow from the order of keyword search, and so from word statistics (docs/access.md)."""


def secrets(tenant: str) -> list[tuple[str, str, str, dict[str, Any]]]:
    """(tenant, source, external id, other fields) of what Eve may not read."""
    fields: dict[str, Any] = {"author": "Mallory", "media_type": "text/x-secret", "title": "Zanzibar"}
    fields |= {"metadata": {"labels": ["zanzibar", "hr"], "priority": 7}}
    return [
        (tenant, "wiki", "secret/plan.md", fields | {"acl_tags": ["user:ann"]}),
        (tenant, "wiki", "secret/half.md", fields | {"acl_tags": ["user:eve"], "required_tags": ["cleared"]}),
        (tenant, "wiki", "secret/former.md", fields | {"acl_tags": ["user:eve"]}),
        (tenant, "wiki", "secret/gone.md", fields | {"acl_tags": ["user:ann"]}),
        (tenant, "vault", "plan.md", fields | {"acl_tags": ["user:ann"]}),
        (tenant, "canary.wiki", "plan.md", fields | {"acl_tags": ["user:eve"]}),  # by a canary that was taken over
        (f"{tenant}-other", "wiki", "dam.md", fields | {"acl_tags": ["user:eve"]}),
        (f"{tenant}-other", "vault", "plan.md", fields | {"acl_tags": ["user:eve"]}),
    ]


def requests(tenant: str, chunk: UUID, standing: UUID) -> Iterator[tuple[str, str, Any]]:
    """The requests of Eve, who knows the names and ids of the secrets. chunk, standing: ids of Ann's."""
    ids = [str(document_id(*secret[:3])) for secret in secrets(tenant)]
    names = [secret[2] for secret in secrets(tenant)]
    queries = ("turbines of the reservoir", "zanzibar", "PROJ-4821", "Mallory", SECRET)
    filters: list[dict[str, Any]] = [
        {},
        {"documents": ids},
        {"authors": ["Mallory"]},
        {"sources": ["vault"]},
        {"media_types": ["text/x-secret"]},
        {"metadata": {"labels": ["zanzibar", "hr"]}},
        {"metadata": {"priority": {"gte": 5}}},
    ]
    for query in queries:
        for mode in ("vector", "keyword", "hybrid"):
            for filter_ in filters if query == queries[0] else filters[:1]:
                body = {"query": query, "mode": mode, "filters": filter_, "facets": ["labels", "priority"]}
                yield "POST", "/v1/search", body
    for sort in ("newest", "oldest"):
        yield "POST", "/v1/search", {"query": queries[0], "mode": "keyword", "sort": sort}
    at = datetime(2026, 6, 1, tzinfo=UTC)
    for id_ in map(UUID, ids):
        for change in (
            publication.content(id_, 0),
            publication.content(id_, 2**62),
            publication.access(id_, at),
            publication.deletion(id_, at),
            publication.deletion(id_, datetime(2100, 1, 1, tzinfo=UTC)),
        ):
            yield "POST", "/v1/search", {"query": "dam", "at_least": publication.token([change]), "wait_seconds": 0}
    yield "GET", "/v1/facets", None
    for question in queries[:3]:
        yield "POST", "/v1/answers", {"question": question}
        yield "POST", "/v1/answers", {"question": question, "documents": ids}
        yield "POST", "/v1/answers", {"question": question, "collection": "vault"}
        yield "POST", "/v1/answers", {"question": question, "history": True}
    for id_ in ids:
        yield "GET", f"/v1/documents/{id_}", None
        yield "GET", f"/v1/documents/{id_}/why", None
        yield "GET", f"/v1/conflicts?document={id_}", None
    yield "GET", "/v1/conflicts?limit=200", None
    yield "GET", "/v1/conflicts?limit=1", None
    yield "GET", "/v1/conflicts?source=vault", None
    for name in names:
        yield "GET", f"/v1/conflicts?document={name}", None
    for conflict in CONFLICTS:
        for decision in ("dismissed", "open"):
            yield "POST", f"/v1/conflicts/{conflict}", {"decision": decision}
    yield "POST", "/v1/feedback", {"chunk_id": str(chunk), "query": "zanzibar", "verdict": "up"}
    yield "GET", "/v1/standing", None
    yield "GET", f"/v1/standing/{standing}", None
    yield "POST", f"/v1/standing/{standing}/answer", None
    yield "DELETE", f"/v1/standing/{standing}", None
    for source in ("wiki", "vault"):
        for name in names:
            for change in ({"content": None}, {"content": "Other words."}, {"content": SECRET}):
                proposed = {"path": name, "external_id": name, **change}
                yield "POST", "/v1/previews", {"source": source, "documents": [proposed]}
    yield "POST", "/v1/previews", {"source": "wiki", "documents": [], "folders": ["secret"]}
    yield "POST", "/v1/previews", {"source": "vault", "documents": [], "folders": ["."]}
    for name, arguments in (
        ("search", {"query": "zanzibar"}),
        ("search", {"query": queries[0], "facets": ["labels"]}),
        *(("fetch", {"id": id_}) for id_ in ids),
        *(("conflicts", {"document": name}) for name in names),
        ("standing", {}),
        ("standing_show", {"id": str(standing)}),
        ("standing_ask", {"id": str(standing)}),
        ("standing_remove", {"id": str(standing)}),
    ):
        call = {"name": name, "arguments": arguments}
        yield "POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}


def stable(body: Any) -> Any:
    """A response without what differs between two equal requests, and without the order of its lists."""
    if isinstance(body, dict):
        stays = {n: v for n, v in body.items() if n == "document_id" or not (VOLATILE.search(n) or n in BY_WORDS)}
        return {n: stable(json.loads(v) if n == "text" and v[:1] == "{" else v) for n, v in stays.items()}
    if isinstance(body, str):
        return re.sub(r"[0-9.]+ s\b", "… s", body)  # how long a note says that something took
    return sorted(map(stable, body), key=json.dumps) if isinstance(body, list) else body


async def observed(
    client: httpx.AsyncClient, headers: dict[str, str], each: Iterator[tuple[str, str, Any]]
) -> dict[str, Any]:
    """By request: status and body."""
    seen = {}
    for method, path, body in each:
        way = WAY_IN if path == "/mcp" else {}
        response = await client.request(method, path, json=body, headers={**way, **headers})
        assert response.status_code < 500, (path, body, response.text)
        seen[f"{method} {path} {json.dumps(body)}"] = (
            response.status_code,
            stable(response.json()) if response.content else None,
        )
    seen["pages"] = sorted([page async for page in _pages(client, headers)])
    return seen


async def _pages(client: httpx.AsyncClient, headers: dict[str, str]) -> AsyncIterator[list[str]]:
    """The pages of a search, one passage each."""
    cursor = None
    while True:
        body = {"query": "the dam", "mode": "keyword", "sort": "newest", "top": 1, "cursor": cursor}
        response = (await client.post("/v1/search", json=body, headers=headers)).json()
        yield [result["external_id"] for result in response["results"]]
        if (cursor := response["cursor"]) is None:
            return


async def conflict(world: World, id_: UUID, tenant: str, a: UUID, b: UUID) -> None:
    await world.library.execute(
        "INSERT INTO conflicts (id, tenant, generation, kind, document_a, document_b, chunk_a, chunk_b, places)"
        " SELECT %s, %s, m.generation, 'number', m.document_id, n.document_id, m.chunk_ids[1], n.chunk_ids[1], '[]'"
        " FROM manifests m JOIN manifests n USING (generation) WHERE m.document_id = %s AND n.document_id = %s",
        id_,
        tenant,
        a,
        b,
    )


async def plant(world: World, tenant: str, ask: Callable[[], Any]) -> None:
    """Add the secrets, and everything that is made from documents. ask: has Ann keep a standing question."""
    events: dict[tuple[str, str, str], Event] = {}
    for owner, source, name, fields in secrets(tenant):
        content = f"{SECRET} In {source} at {name}."
        events[owner, source, name] = document(name, content, tenant=owner, source=source, **fields)
    await world.library.put(*events.values())
    former, gone = events[tenant, "wiki", "secret/former.md"], events[tenant, "wiki", "secret/gone.md"]
    await world.library.put(access(former, ["user:ann"]), deletion(gone))  # type: ignore[arg-type]
    own = document_id(tenant, "wiki", "dam.md")
    plan, vault = document_id(tenant, "wiki", "secret/plan.md"), document_id(tenant, "vault", "plan.md")
    other = document_id(f"{tenant}-other", "wiki", "dam.md")
    pairs = [(tenant, own, plan), (tenant, plan, own), (tenant, plan, vault), (tenant, own, other)]
    for id_, (owner, a, b) in zip(CONFLICTS, [*pairs, (f"{tenant}-other", other, own)], strict=True):
        await conflict(world, id_, owner, a, b)
    await world.library.execute(
        "INSERT INTO connector_freshness (tenant, source, epoch, tracked_since, every_seconds, complete_until)"
        " VALUES (%s, 'vault', 1, now(), 600, now()), (%s, 'wiki', 1, now(), 600, now())",
        tenant,
        f"{tenant}-other",
    )
    async with world.library.pool.connection() as connection:
        for owner in (tenant, f"{tenant}-other"):
            question = (
                "which turbines does zanzibar have",
                (Judged("wiki", "secret/plan.md"), Judged("wiki", "dam.md")),
            )
            await golden.store(connection, Golden(owner, *question))
    at = document("x", "").observed_at
    groups = [
        IdentityChanged(tenant=tenant, source="vault", principal="ann", groups=["cleared"], observed_at=at),
        IdentityChanged(tenant=f"{tenant}-other", source="wiki", principal="eve", groups=["cleared"], observed_at=at),
    ]
    await world.paths.learn(groups)
    await ask()


async def test_what_a_caller_may_not_read_changes_nothing_that_it_receives(world: World, tenant: str) -> None:
    eve, ann = as_("eve", tenant), as_("ann", tenant)
    async with world.library.pool.connection() as connection:
        for owner in (tenant, f"{tenant}-other"):
            await metadata_keys.declare(connection, owner, "labels", "keyword")
            await metadata_keys.declare(connection, owner, "priority", "number")
    await world.library.put(
        *(
            document(name, text, tenant=tenant, acl_tags=["user:eve"], metadata={"labels": ["hr"], "priority": 1})
            for name, text in OWN.items()
        )
    )
    own, hall = document_id(tenant, "wiki", "dam.md"), document_id(tenant, "wiki", "hall.md")
    await conflict(world, uuid4(), tenant, own, hall)
    standing, chunk = uuid4(), uuid4()
    async with service_over(world.library, feedback=FEEDBACK) as (client, _):
        before = await observed(client, eve, requests(tenant, chunk, standing))
    async with service_over(world.library, feedback=FEEDBACK) as (client, _):
        standing_ids: list[str] = []

        async def ask() -> None:
            body = {"question": "which turbines does zanzibar have", "keep": True}
            standing_ids.append((await client.post("/v1/answers", json=body, headers=ann)).json()["standing_id"])

        await plant(world, tenant, ask)
        [(anns,)] = await world.library.execute(
            "SELECT chunk_ids[1] FROM manifests WHERE document_id = %s", document_id(tenant, "vault", "plan.md")
        )
        after = await observed(client, eve, requests(tenant, anns, UUID(standing_ids[0])))
        theirs = await client.post("/v1/search", json={"query": "zanzibar"}, headers=ann)
        assert len(theirs.json()["results"]) >= 1, "without secrets that are there for somebody, this proves nothing"
        listed = (await client.get("/v1/standing", headers=ann)).json()["standing"]
        assert [entry["id"] for entry in listed] == standing_ids, "Eve has removed nothing of Ann's"
    renamed = {
        name.replace(str(anns), str(chunk)).replace(standing_ids[0], str(standing)): v for name, v in after.items()
    }
    assert renamed.keys() == before.keys()
    differs = {name: (before[name], renamed[name]) for name in before if before[name] != renamed[name]}
    assert sorted(differs) == []
