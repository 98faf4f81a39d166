"""Contradictions are detected between passages with a common reader, end with them, and are shown to nobody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio
from click.testing import Result
from typer.testing import CliRunner

from cli.main import app
from deploy.local.stack import Stack
from pipeline.analysis import conflicts as task
from pipeline.analysis.conflicts import Conflicts
from pipeline.analysis.task import Services
from pipeline.core.errors import Retryable
from pipeline.core.identity import document_id
from pipeline.kafka.producer import Stored
from pipeline.stores import graph
from query import conflicts
from query.access.tenant_rows import rows_of
from query.conflicts import conflict_json
from tests.support.pipeline.delivered import delivered
from tests.support.query.http_kit import as_, problem, service_over
from tests.support.query.library import Library, WordEmbedder, access, deletion, document
from topics.messages import ConflictChanged, DocumentIndexed, DocumentMessage, IdentityChanged
from topics.registry import Topic

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

DAYS_30 = "Audit logs of the payment gateway are kept for 30 days."
DAYS_90 = "Audit logs of the payment gateway are kept for 90 days."


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        yield library


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _empty(library: Library, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(task, "SHARE", 1.0)
    sent.clear()
    yield
    for table in ("conflicts", "conflict_examined", "chunks_g1", "manifests", "memberships"):
        await library.execute(f"DELETE FROM {table}")
    await library.execute("UPDATE documents SET deleted_at = now()")


sent: list[ConflictChanged] = []


@dataclass
class Sent:
    """A producer whose records arrive at once."""

    records: list[ConflictChanged]

    async def send(self, topic: Topic, message: ConflictChanged) -> asyncio.Future[Stored]:
        assert message.kind in topic.holds
        self.records.append(message)
        return delivered()


async def indexed(library: Library, *events: DocumentMessage) -> None:
    """Index documents, and have the task examine them."""
    await library.put(*events)
    await examine(library, *events)


async def examine(library: Library, *events: DocumentMessage) -> None:
    services = Services(library.settings, library.pool, Sent(sent), library.metrics)  # type: ignore[arg-type]
    await Conflicts(services).handle(
        [
            DocumentIndexed(
                tenant=event.tenant,
                source=event.source,
                external_id=event.external_id,
                observed_at=datetime.now(UTC),
                document_id=str(document_id(event.tenant, event.source, event.external_id)),
                seq=1,
                state="searchable",
                generation="g1",
            )
            for event in events
        ]
    )


async def seen(
    library: Library, *tags: str, principals: tuple[str, ...] = (), tenant: str = "acme"
) -> list[dict[str, Any]]:
    """The open conflicts as such a reader sees them."""
    caller = await library.caller(tenant, *tags, principals=principals)
    async with rows_of(library.pool, tenant) as connection:
        standing = await conflicts.visible(connection, caller)
        quoted = await conflicts.quotes(connection, standing)
    return [conflict_json(listed, quoted[listed.id]) for listed in standing]


async def stored(library: Library) -> int:
    [(count,)] = await library.execute("SELECT count(*) FROM conflicts")
    return int(count)


async def test_a_large_table_without_a_graph_is_not_read_for_each_passage(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    await library.put(a := document("a.md", DAYS_30), b := document("b.md", DAYS_90))
    await library.execute("ANALYZE")
    await library.execute("UPDATE generations SET vectors = 'elasticsearch'")
    with monkeypatch.context() as large:
        large.setattr(task, "READ_WHOLE_ROWS", 0)
        await examine(library, a, b)
        assert await stored(library) == 0
    await examine(library, a, b)
    assert await stored(library) == 1
    await library.execute("UPDATE generations SET vectors = 'pgvector'")


async def test_a_first_load_goes_before_the_comparisons(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "BUSY_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(task, "BUSY_DOCUMENTS", 1)
    await library.put(a := document("a.md", DAYS_30), b := document("b.md", DAYS_90))
    loading = await library.accept(*(document(f"{n}.md", f"Page {n} is still to be stored.") for n in range(2)))
    examining = asyncio.create_task(examine(library, a, b))
    await asyncio.sleep(0.5)
    assert await stored(library) == 0, "documents are pending"
    await library.converge(*loading)
    async with asyncio.timeout(30):
        await examining
    assert await stored(library) == 1

    await library.execute("DELETE FROM conflict_examined")
    await library.execute("DELETE FROM conflicts")
    await library.accept(*(document(f"{n}.md", f"Page {n} is never stored.") for n in range(2)))
    monkeypatch.setattr(task, "BUSY_AT_MOST_SECONDS", 0.2)
    async with asyncio.timeout(30):
        await examine(library, a, b)
    assert await stored(library) == 1, "a store that stays away delays it only for a while"


async def test_comparisons_wait_for_the_graph(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "BUSY_CHECK_SECONDS", 0.05)
    await library.put(a := document("a.md", DAYS_30), b := document("b.md", DAYS_90))
    name = graph.own_name(library.generation)
    [(definition,)] = await library.execute("SELECT pg_get_indexdef(%s::regclass)", name)
    await library.execute(f"DROP INDEX {name}")
    monkeypatch.setattr(graph, "GRAPH_FROM_ROWS", 2)
    examining = asyncio.create_task(examine(library, a, b))
    await asyncio.sleep(0.5)
    assert await stored(library) == 0, "each comparison would read the whole table"
    await library.execute(definition)
    async with asyncio.timeout(30):
        await examining
    assert await stored(library) == 1


async def test_a_contradiction_names_both_passages_and_quotes_them(library: Library) -> None:
    counter = library.metrics.conflicts_detected.labels("number")._value
    before = counter.get()
    await indexed(library, document("a.md", DAYS_30), document("b.md", DAYS_90))
    [conflict] = await seen(library, "staff")
    assert conflict["kind"] == "number"
    assert sorted(conflict["external_ids"]) == ["a.md", "b.md"]
    assert sorted(conflict["quotes"]) == sorted([DAYS_30, DAYS_90])
    assert set(conflict["documents"]) == {str(document_id("acme", "wiki", name)) for name in ("a.md", "b.md")}
    [place] = conflict["places"]
    quoted = [quote[slice(*span)] for quote, span in zip(conflict["quotes"], place["spans"], strict=True)]
    assert sorted(quoted) == ["30 days", "90 days"]
    assert counter.get() == before + 1


async def test_examining_again_changes_nothing(library: Library) -> None:
    events = document("a.md", DAYS_30), document("b.md", DAYS_90)
    await indexed(library, *events)
    before = await library.execute("SELECT * FROM conflicts")
    await library.execute("DELETE FROM conflict_examined")
    await examine(library, *events)
    assert await library.execute("SELECT * FROM conflicts") == before


async def test_an_edit_that_resolves_it_ends_the_conflict(library: Library) -> None:
    await indexed(library, document("a.md", DAYS_30), document("b.md", DAYS_90))
    edited = document("b.md", f"{DAYS_30} So says the policy.")
    await library.put(edited)
    assert await seen(library, "staff") == []  # at once, although the task has not examined it
    await examine(library, edited)
    assert await stored(library) == 0
    assert [message.state for message in sent] == ["open", "ended"]
    assert len({message.key for message in sent}) == 1


async def test_a_deleted_document_ends_its_conflicts(library: Library) -> None:
    other = document("b.md", DAYS_90)
    await indexed(library, document("a.md", DAYS_30), other)
    await library.put(deletion(other))
    assert await seen(library, "staff") == []
    await examine(library, other)
    assert await stored(library) == 0


async def test_only_new_passages_are_compared_after_an_edit(library: Library) -> None:
    first = document("a.md", DAYS_30)
    await indexed(library, first)
    compared = library.metrics.conflicts_examined._value.get()
    await examine(library, first)
    assert library.metrics.conflicts_examined._value.get() == compared


async def test_a_long_document_continues_where_it_was_interrupted(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "READ_AT_ONCE", 1)
    nearest, looked_up = task.nearest, []

    async def nearest_until_interrupted(*arguments: Any) -> Any:
        looked_up.extend(row.chunk_id for row in arguments[-1])
        if len(looked_up) == 2:
            raise Retryable("Kafka took the partition away", service="kafka")
        return await nearest(*arguments)

    monkeypatch.setattr(task, "nearest", nearest_until_interrupted)
    words = (" ".join(f"word{part}of{n}" for n in range(150)) + "." for part in range(3))
    long = document("long.md", "\n\n".join(words))
    with pytest.raises(Retryable):
        await indexed(library, long)
    await examine(library, long)
    assert len(looked_up) == len(set(looked_up)) + 1 > 3, "only the passage in which it was interrupted is repeated"


async def test_passages_without_a_common_reader_are_never_compared(library: Library) -> None:
    await indexed(library, document("a.md", DAYS_30, acl_tags=["board"]), document("b.md", DAYS_90, acl_tags=["staff"]))
    assert await stored(library) == 0


async def test_a_person_with_both_memberships_is_a_common_reader(library: Library) -> None:
    member = IdentityChanged(
        tenant="acme", source="wiki", principal="ann", groups=["board", "staff"], observed_at=datetime.now(UTC)
    )
    await library.execute(
        "INSERT INTO memberships VALUES (%s, %s, %s, %s, now())", "acme", "wiki", member.principal, member.groups
    )
    await indexed(library, document("a.md", DAYS_30, acl_tags=["board"]), document("b.md", DAYS_90, acl_tags=["staff"]))
    assert len(await seen(library, principals=("ann",))) == 1
    assert await seen(library, "board") == []
    assert await seen(library, "staff") == []
    assert len(await seen(library, "board", "staff")) == 1


async def test_a_conflict_is_hidden_as_soon_as_a_side_may_not_be_read(library: Library) -> None:
    other = document("b.md", DAYS_90)
    await indexed(library, document("a.md", DAYS_30), other)
    await library.accept(access(other, ["board"]))
    assert await seen(library, "staff") == []
    assert len(await seen(library, "staff", "board")) == 1


@pytest.mark.parametrize("tags", [["board"], []])
async def test_a_conflict_ends_with_its_last_common_reader_and_returns_with_one(
    library: Library, tags: list[str]
) -> None:
    one, other = document("a.md", DAYS_30), document("b.md", DAYS_90)
    await indexed(library, one, other)
    await library.accept(access(other, tags))
    await examine(library, other)  # somebody who could read it no longer may: announced before the stores follow
    assert await stored(library) == 0
    assert [message.state for message in sent] == ["open", "ended"]
    await indexed(library, access(other, ["staff"]))
    assert len(await seen(library, "staff")) == 1
    assert [message.state for message in sent] == ["open", "ended", "open"]
    assert len({message.key for message in sent}) == 1


async def test_a_conflict_that_other_readers_share_stands(library: Library) -> None:
    one, other = document("a.md", DAYS_30, acl_tags=["staff", "board"]), document("b.md", DAYS_90)
    await indexed(library, one, other)
    await indexed(library, access(other, ["board"]))
    assert len(await seen(library, "board")) == 1
    assert [message.state for message in sent] == ["open"]


async def test_passages_that_get_a_common_reader_later_are_compared_then(library: Library) -> None:
    other = document("b.md", DAYS_90)
    await indexed(library, document("a.md", DAYS_30, acl_tags=["board"]), other)
    assert await stored(library) == 0
    await indexed(library, access(other, ["staff", "board"]))
    assert len(await seen(library, "board")) == 1


async def test_a_required_tag_hides_it_too(library: Library) -> None:
    await indexed(library, document("a.md", DAYS_30), document("b.md", DAYS_90, required_tags=["cleared"]))
    assert await seen(library, "staff") == []


async def test_another_tenant_has_no_part_in_it(library: Library) -> None:
    await indexed(library, document("a.md", DAYS_30), document("b.md", DAYS_90, tenant="umbra"))
    assert await stored(library) == 0
    await indexed(library, document("c.md", DAYS_90))
    assert await seen(library, "staff", tenant="umbra") == []
    [conflict] = await seen(library, "staff")
    caller = await library.caller("umbra", "staff")
    async with rows_of(library.pool, "umbra") as connection:
        assert not await conflicts.decide(connection, caller, UUID(conflict["id"]), "dismissed")


async def test_what_is_dismissed_stays_dismissed_until_a_side_changes(library: Library) -> None:
    events = document("a.md", DAYS_30), document("b.md", DAYS_90)
    await indexed(library, *events)
    [conflict] = await seen(library, "staff")
    outsider, caller = await library.caller("acme", "nobody"), await library.caller("acme", "staff")
    async with rows_of(library.pool, "acme") as connection:
        assert not await conflicts.decide(connection, outsider, UUID(conflict["id"]), "accepted")
        assert await conflicts.decide(connection, caller, UUID(conflict["id"]), "dismissed")
    await library.execute("DELETE FROM conflict_examined")
    await examine(library, *events)
    assert await seen(library, "staff") == []
    await indexed(library, document("b.md", f"{DAYS_90} So says the policy."))
    assert len(await seen(library, "staff")) == 1


async def test_equal_passages_are_duplicates_and_no_contradiction(library: Library) -> None:
    await indexed(library, document("a.md", DAYS_30), document("b.md", DAYS_30))
    assert [conflict["kind"] for conflict in await seen(library, "staff")] == ["duplicate"]


async def penstock(home: Path, *arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["conflicts", *arguments], env={"PENSTOCK_HOME": str(home)})


async def listed(home: Path, *options: str) -> list[dict[str, Any]]:
    done = await penstock(home, "list", "--tenant", "acme", "--json", *options)
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document.keys() == {"conflicts", "cursor"}
    return list(document["conflicts"])


async def test_the_command_lists_and_decides_conflicts(library: Library, tmp_path: Path) -> None:
    library.write_home(tmp_path)
    await indexed(library, document("a.md", DAYS_30), document("b.md", DAYS_90))
    [conflict] = await listed(tmp_path)
    assert conflict.keys() >= {"kind", "documents", "passages", "at"}
    assert conflict["quotes"] is None, "an operator who reads as nobody is shown no text"
    [read] = await listed(tmp_path, "--tag", "staff")
    assert sorted(read["quotes"]) == sorted([DAYS_30, DAYS_90])
    assert await listed(tmp_path, "--as", "eve") == []
    assert (await penstock(tmp_path, "accept", conflict["id"], "--tenant", "umbra")).exit_code == 1
    assert (await penstock(tmp_path, "dismiss", conflict["id"], "--tenant", "acme")).exit_code == 0
    assert await listed(tmp_path) == []
    assert [dismissed["id"] for dismissed in await listed(tmp_path, "--state", "dismissed")] == [conflict["id"]]
    assert (await penstock(tmp_path, "list", "--kind", "colour")).exit_code == 2


async def test_the_command_lists_the_conflicts_of_a_source_or_document(library: Library, tmp_path: Path) -> None:
    library.write_home(tmp_path)
    await indexed(
        library,
        document("a.md", DAYS_30),
        document("b.md", DAYS_90),
        document("c.md", "Backups are encrypted before they leave the office.", source="drive"),
        document("d.md", "Backups are not encrypted before they leave the office.", source="drive"),
    )
    assert sorted(conflict["kind"] for conflict in await listed(tmp_path)) == ["negation", "number"]
    named = str(document_id("acme", "drive", "d.md"))
    for options, kinds in (
        (("--source", "drive"), ["negation"]),
        (("--source", "wiki", "--source", "mail"), ["number"]),
        (("--source", "mail"), []),
        (("--document", "a.md"), ["number"]),
        (("--document", named), ["negation"]),
        (("--document", "a.md", "--tag", "staff"), ["number"]),
        (("--document", "a.md", "--source", "drive"), []),
    ):
        assert [conflict["kind"] for conflict in await listed(tmp_path, *options)] == kinds, options


async def test_over_http_a_reader_of_both_passages_lists_and_decides(library: Library) -> None:
    await indexed(
        library,
        document("a.md", DAYS_30, acl_tags=["user:ann"]),
        document("b.md", DAYS_90, acl_tags=["user:ann", "user:bob"]),
    )
    async with service_over(library) as (client, _):
        [conflict] = (await client.get("/v1/conflicts", headers=as_("ann"))).json()["conflicts"]
        assert (conflict["kind"], conflict["state"]) == ("number", "open")
        assert (await client.get("/v1/conflicts", headers=as_("bob"))).json() == {"conflicts": [], "cursor": None}
        path, accepted = f"/v1/conflicts/{conflict['id']}", {"decision": "accepted"}
        assert (await client.post(path, json=accepted, headers=as_("bob"))).status_code == 404
        assert (await client.post(path, json=accepted, headers=as_("ann"))).status_code == 204
        assert (await client.get("/v1/conflicts", headers=as_("ann"))).json() == {"conflicts": [], "cursor": None}
        [decided] = (await client.get("/v1/conflicts?state=accepted", headers=as_("ann"))).json()["conflicts"]
        assert decided["id"] == conflict["id"]


async def test_over_http_conflicts_are_filtered_and_come_in_pages(library: Library) -> None:
    texts = [
        (DAYS_30, DAYS_90),
        ("Backups are encrypted before they leave.", "Backups are not encrypted before they leave."),
    ]
    texts.append(("The office in Lyon opens at 8 on weekdays.", "The office in Lyon opens at 9 on weekdays."))
    for n, (one_side, other_side) in enumerate(texts):
        await indexed(
            library,
            document(f"a{n}.md", one_side, source=f"s{n}", acl_tags=["user:ann"]),
            document(f"b{n}.md", other_side, acl_tags=["user:ann"]),
        )
    async with service_over(library) as (client, _):

        async def page(**parameters: Any) -> dict[str, Any]:
            answer = await client.get("/v1/conflicts", params=parameters, headers=as_("ann"))
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        everything = await page()
        ids = [conflict["id"] for conflict in everything["conflicts"]]
        assert (len(ids), everything["cursor"]) == (3, None)
        paged: list[str] = []
        cursor: dict[str, str] = {}
        while len(paged) < 3:
            part = await page(limit=1, **cursor)
            paged += [conflict["id"] for conflict in part["conflicts"]]
            cursor = {"cursor": part["cursor"]}
        assert paged == ids
        assert (await page(limit=1, **cursor)) == {"conflicts": [], "cursor": None}
        [of_source] = (await page(source="s1"))["conflicts"]
        assert of_source["kind"] == "negation"
        [of_document] = (await page(document=of_source["documents"][0]))["conflicts"]
        assert of_document["id"] == of_source["id"]
        for filtered in ("source=%00", "document=%00"):
            refused = await client.get(f"/v1/conflicts?{filtered}", headers=as_("ann"))
            assert problem(refused)[0] == 422, "Postgres would refuse it"
        refused = await client.get("/v1/conflicts?cursor=none", headers=as_("ann"))
        assert problem(refused) == (422, "bad-query")


async def test_a_lost_membership_ends_the_conflicts_that_nobody_may_read_any_more(library: Library) -> None:
    await members(library, "ann", "crew", "board")
    await members(library, "bob", "crew")
    await indexed(library, document("a.md", DAYS_30, acl_tags=["crew"]), document("b.md", DAYS_90, acl_tags=["board"]))
    assert len(await seen(library, principals=("ann",))) == 1
    await members(library, "bob")
    await left(library, "bob")
    assert await stored(library) == 1, "ann may still read both"
    await members(library, "ann", "crew")
    await left(library, "ann")
    assert await stored(library) == 0
    assert [record.state for record in sent][-1] == "ended"
    await members(library, "ann", "crew", "board")
    await left(library, "ann")
    assert await stored(library) == 0, "it is compared again when one of its documents is announced"


async def test_a_changed_membership_takes_no_more_of_the_database_than_a_comparison(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record, whose signature nobody looks at here, had all of a tenant's conflicts examined without a pause."""
    await members(library, "ann", "board", "staff")
    await indexed(library, document("a.md", DAYS_30, acl_tags=["board"]), document("b.md", DAYS_90, acl_tags=["staff"]))
    assert await stored(library) == 1
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(task, "SHARE", 0.25)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", pause)
        await left(library, "ann")
    assert len([seconds for seconds in pauses if seconds > 0]) == 1


async def members(library: Library, principal: str, *groups: str) -> None:
    await library.execute(
        "INSERT INTO memberships VALUES ('acme', 'wiki', %s, %s, clock_timestamp()) ON CONFLICT (tenant, principal,"
        " source) DO UPDATE SET groups = excluded.groups, observed_at = excluded.observed_at",
        principal,
        list(groups),
    )


async def left(library: Library, principal: str) -> None:
    """Announce the groups that the principal has now."""
    [(groups, observed_at)] = await library.execute(
        "SELECT groups, observed_at FROM memberships WHERE tenant = 'acme' AND principal = %s", principal
    )
    services = Services(library.settings, library.pool, Sent(sent), library.metrics)  # type: ignore[arg-type]
    await Conflicts(services).handle(
        [IdentityChanged(tenant="acme", source="wiki", principal=principal, groups=groups, observed_at=observed_at)]
    )
