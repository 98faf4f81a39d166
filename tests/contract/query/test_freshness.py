"""Freshness certificates of searches and answers: never more than is recorded, and nothing of what may not be read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from query.access.filters import Filters
from query.model import SourceFreshness
from tests.support.query.http_kit import World, as_
from tests.support.query.library import Library, access, deletion, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


async def record(library: Library, tenant: str, source: str = "wiki", **values: Any) -> datetime:
    """Record a source as a runner does that has read it completely a minute ago. Returns that time."""
    [(now,)] = await library.execute("SELECT clock_timestamp()")
    at = now - timedelta(minutes=1)
    row = {
        "tenant": tenant,
        "source": source,
        "epoch": 1,
        "tracked_since": at,
        "every_seconds": 600.0,
        **dict.fromkeys(("listed_at", "complete_until", "access_until", "groups_until"), at),
        "generation": library.generation.name,
        **values,
    }
    await library.execute(
        f"INSERT INTO connector_freshness ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})"
        f" ON CONFLICT (tenant, source) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in row)}",
        *row.values(),
    )
    return at


async def certified(library: Library, tenant: str, who: str = "ann", *sources: str) -> list[SourceFreshness]:
    caller = await library.search.identify(tenant, principals=[who])
    response = await library.search.search("crane", caller, mode="keyword", filters=Filters(sources=sources))
    assert response.freshness == await library.search.freshness(caller, sources), "a search and an answer say the same"
    return list(response.freshness)


async def test_a_search_says_up_to_when_each_source_is_complete(library: Library, tenant: str) -> None:
    for source in ("drive", "wiki", "notes"):
        await library.put(document("plan.md", "Move the crane.", tenant=tenant, source=source, acl_tags=["user:ann"]))
    wiki = await record(library, tenant)
    drive = await record(library, tenant, "drive", has_gaps=True, groups_until=datetime(2026, 1, 1, tzinfo=UTC))
    assert await certified(library, tenant) == [
        SourceFreshness("drive", drive, datetime(2026, 1, 1, tzinfo=UTC), (), True),
        SourceFreshness("notes", None, None, ("unlisted",), False),
        SourceFreshness("wiki", wiki, wiki, (), False),
    ]
    assert [source.source for source in await certified(library, tenant, "ann", "wiki")] == ["wiki"]


async def test_a_certificate_names_what_lags(library: Library, tenant: str) -> None:
    await library.put(document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:ann"]))
    now = datetime.now(UTC)
    await record(library, tenant, listed_at=now)
    assert [source.lags for source in await certified(library, tenant)] == [("stores",)]
    long_ago = now - timedelta(hours=1)
    await record(library, tenant, listed_at=long_ago, complete_until=long_ago, access_until=long_ago)
    [source] = await certified(library, tenant)
    assert (source.lags, source.complete_until) == (("source",), long_ago)


@pytest.mark.parametrize(
    "values",
    [
        {"generation": "another"},
        {"reopened_at": datetime(2026, 1, 1, tzinfo=UTC)},
        {"complete_until": datetime(2100, 1, 1, tzinfo=UTC)},
    ],
)
async def test_a_time_that_may_not_be_true_is_not_certified(
    library: Library, tenant: str, values: dict[str, Any]
) -> None:
    """Recorded of another generation, before a store lacked something, or by a clock that was ahead."""
    await library.put(document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:ann"]))
    await record(library, tenant, **values)
    [source] = await certified(library, tenant)
    assert source.complete_until is None


async def test_nothing_is_said_of_a_source_of_which_the_caller_can_read_nothing(library: Library, tenant: str) -> None:
    plan = document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:bob"])
    shared = document("shared.md", "Move the crane.", tenant=tenant, source="drive", acl_tags=["user:eve"])
    await library.put(plan)
    await library.put(shared)
    await record(library, tenant)
    await record(library, tenant, "drive")
    await record(library, f"{tenant}-2", "drive", has_gaps=True)
    assert [source.source for source in await certified(library, tenant, "eve")] == ["drive"]
    assert await certified(library, tenant, "eve", "wiki") == []
    assert await certified(library, tenant, "nobody") == []
    await library.put(access(plan, ["user:eve"]))
    assert len(await certified(library, tenant, "eve")) == 2
    await library.put(access(plan, ["user:bob"]))
    assert len(await certified(library, tenant, "eve")) == 1, "the access set that admitted eve is still there"
    await library.put(deletion(shared))
    assert await certified(library, tenant, "eve") == []


async def test_responses_over_http_have_the_certificates(world: World, tenant: str) -> None:
    library = world.library
    await library.put(document("plan.md", "Move the crane.", tenant=tenant, acl_tags=["user:ann"]))
    at = await record(library, tenant)
    expected = [
        {
            "source": "wiki",
            "complete_until": at.isoformat(),
            "access_until": at.isoformat(),
            "lags": [],
            "has_gaps": False,
        }
    ]
    for path, body in (("search", {"query": "crane"}), ("answers", {"question": "crane?"})):
        response = await world.client.post(f"/v1/{path}", json=body, headers=as_("ann", tenant))
        assert response.json()["freshness"] == expected, path
