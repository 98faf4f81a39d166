"""Differences between what a connector published, what the ledger accepted and what the source has."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from connectors.operate import summarize
from connectors.runner import reconcile
from connectors.runner.instance import Instance
from connectors.runner.membership import ChangedSet, MembershipTables
from connectors.runner.plan import Plan
from connectors.runner.rows import Rows
from pipeline.core.identity import document_id, qualify
from pipeline.core.producers import CODES
from pipeline.maintenance.recover import republish
from tests.support.connectors.runner_kit import Bench, kinds
from tests.support.connectors.runner_world import WorldSource
from tests.support.pipeline.folded import fold_all
from topics.messages import IdentityChanged

pytestmark = pytest.mark.stack

SOURCE = "wiki"


async def put(
    bench: Bench,
    id_: str,
    *,
    version: int | None,
    acl_tags: Sequence[str] = ("staff",),
    at: datetime | None = None,
    source: str = SOURCE,
    deleted_at: datetime | None = None,
) -> None:
    """A document as the ledger has it."""
    tags = list(qualify(source, acl_tags))
    digest = hashlib.sha256(json.dumps(tags).encode()).digest()
    at = at or datetime.now(UTC)
    await bench.query(
        "INSERT INTO access_sets (tenant, digest, acl_tags, required_tags) VALUES (%s, %s, %s, '{}')"
        " ON CONFLICT DO NOTHING",
        bench.tenant,
        digest,
        tags,
    )
    await bench.query(
        "INSERT INTO documents (id, tenant, source, external_id, version, observed_at, deleted_at, access_observed_at,"
        " access_id) SELECT %s, %s, %s, %s, %s, %s, %s, %s, id FROM access_sets WHERE tenant = %s AND digest = %s"
        " ON CONFLICT (id) DO UPDATE SET version = EXCLUDED.version, observed_at = EXCLUDED.observed_at,"
        " deleted_at = EXCLUDED.deleted_at, access_observed_at = EXCLUDED.access_observed_at,"
        " access_id = EXCLUDED.access_id",
        document_id(bench.tenant, source, id_),
        bench.tenant,
        source,
        id_,
        version,
        at,
        deleted_at,
        at,
        bench.tenant,
        digest,
    )


async def accept(bench: Bench) -> None:
    """The ledger accepts everything that was published so far."""
    await bench.take()
    for id_, state in fold_all(bench.taken).items():
        await put(
            bench,
            id_,
            version=state.version,
            acl_tags=state.acl_tags,
            at=state.access_observed_at,
            deleted_at=state.deleted_at,
        )
    for message in bench.taken:
        if isinstance(message, IdentityChanged):
            await put_groups(bench, message.principal, message.groups, message.observed_at)


async def put_groups(bench: Bench, principal: str, groups: Sequence[str], at: datetime) -> None:
    await bench.query(
        "INSERT INTO memberships AS m VALUES (%s, %s, %s, %s, %s) ON CONFLICT (tenant, principal, source)"
        " DO UPDATE SET groups = EXCLUDED.groups, observed_at = EXCLUDED.observed_at"
        " WHERE EXCLUDED.observed_at >= m.observed_at",
        bench.tenant,
        SOURCE,
        principal,
        list(groups),
        at,
    )


async def put_letter(bench: Bench, code: str = "invalid") -> None:
    await bench.query(
        'INSERT INTO dead_letters (id, topic, partition, "offset", stage, code, message, document_id,'
        " first_failed_at) VALUES (%s, 't', 0, 0, 'detect', %s, '', %s, now())",
        f"{bench.tenant}:{code}",
        code,
        document_id(bench.tenant, SOURCE, "d000"),
    )


async def mark_everything_handled(bench: Bench) -> None:
    """As the detect worker notes it: whatever was sent until now has been handled."""
    await bench.query(
        "INSERT INTO handled SELECT stage, clock_timestamp() FROM unnest(ARRAY['detect', 'identities']) stage"
        " ON CONFLICT (stage) DO UPDATE SET until = EXCLUDED.until"
    )


@asynccontextmanager
async def loaded(bench: Bench) -> AsyncIterator[Instance]:
    """Everything read and published once, and the comparison after the first sweep done."""
    async with bench.loaded() as instance:
        await bench.ask("reconcile")
        yield instance


async def compare_twice(bench: Bench) -> dict[str, object]:
    """A difference that may be in flight counts when it is seen again after everything sent before has been handled."""
    await bench.ask("reconcile")
    await mark_everything_handled(bench)
    return await bench.ask("reconcile")


async def wait_until_idle(instance: Instance) -> None:
    """Wait until the work that the comparison requested is done."""
    await Bench.until(
        lambda: all(
            not activity.pending and activity.status.state != "running"
            for name, activity in instance.activities.items()
            if name != "listen"
        )
    )


async def published(bench: Bench, instance: Instance) -> list[tuple[str, str]]:
    await wait_until_idle(instance)
    async with asyncio.timeout(60):
        while not (messages := await bench.take()):
            await asyncio.sleep(0.05)
    return kinds(messages)


async def test_a_document_known_only_to_the_ledger_is_deleted_by_the_sweep_after_reconciliation(
    bench: Bench,
) -> None:
    bench.world.fill(30)
    async with loaded(bench) as instance:
        await accept(bench)
        await put(bench, "undead", version=7, acl_tags=["everyone"])
        await bench.ask("sweep")
        assert (await bench.ask("reconcile")).get("documents") == 31
        await wait_until_idle(instance)
        assert await bench.take() == []  # a sweep alone deletes
        await bench.ask("sweep")
        assert await published(bench, instance) == [("document.deleted", "undead")]
        await accept(bench)
        assert "unknown" not in await bench.ask("reconcile")
    [(difference, gone)] = await bench.mine("difference, gone", "connector_items", "external_id = 'undead'")
    assert (difference, gone) == ("unknown", True)


def codes(instance: Instance) -> set[str]:
    """Return the codes of the problems; that nobody holds the documents' tag is none of these tests."""
    return {problem.code for problem in instance.problems()} - {"tag_unheld"}


async def test_many_documents_known_only_to_the_ledger_are_deleted_after_confirmation(bench: Bench) -> None:
    bench.world.fill(3)
    async with loaded(bench):
        await accept(bench)
        for n in range(25):
            await put(bench, f"undead{n:02}", version=7)
        await bench.ask("reconcile")
    async with bench.running() as instance:  # another runner looks at what is in doubt at once, but not at these
        await bench.until(lambda: "sweep" in instance.activities)
        await bench.ask("sweep")
        assert codes(instance) == {"mass_delete"}
        assert await bench.take() == []
        await bench.ask("allow_mass_delete")
        assert len(await published(bench, instance)) == 25


async def test_access_that_the_ledger_holds_wider_after_a_restored_backup_is_narrowed_again(bench: Bench) -> None:
    """Published with everyone, which the ledger accepted and a restored backup has forgotten."""
    bench.world.write("d000", revision="1")
    async with loaded(bench) as instance:
        await accept(bench)
        [(version,)] = await bench.mine("version", "connector_items")
        await put(bench, "d000", version=version, acl_tags=["everyone"])
        assert (await bench.ask("reconcile")).get("newer") == 1
        await published(bench, instance)
        await accept(bench)
        assert fold_all(bench.taken)["d000"].acl_tags == ("staff",)
        assert "newer" not in await bench.ask("reconcile")


async def test_access_of_a_process_whose_clock_was_ahead_is_replaced(bench: Bench) -> None:
    """Its event reached the ledger, and a failover of Postgres has undone its rows."""
    bench.world.write("d000", revision="1")
    async with loaded(bench) as instance:
        await accept(bench)
        [(version,)] = await bench.mine("version", "connector_items")
        ahead = datetime.now(UTC) + timedelta(minutes=2)
        await put(bench, "d000", version=version, acl_tags=["everyone"], at=ahead)
        assert (await bench.ask("reconcile")).get("newer") == 1
        await wait_until_idle(instance)
        stamps = [message.observed_at for message in await bench.take() if message.external_id == "d000"]
        assert stamps
        assert min(stamps) > ahead


async def test_a_document_that_recover_has_marked_is_published_above_the_ledgers_version(bench: Bench) -> None:
    bench.world.fill(1)
    async with loaded(bench):
        await accept(bench)
    await put(bench, "d000", version=2**62)
    await republish(bench.pool)
    assert await bench.mine("version", "connector_items") == [(2**62,)]


async def test_a_document_in_doubt_is_published_above_the_ledgers_version(bench: Bench) -> None:
    """It came into doubt between its comparison and the repair."""
    bench.world.fill(1)
    async with loaded(bench) as instance:
        await accept(bench)
        await bench.query("UPDATE connector_items SET in_doubt_since = 'epoch' WHERE tenant = %s", bench.tenant)
        assert instance._publisher is not None
        await instance._publisher.mark_in_doubt({"d000": (2**62, "newer")}, lambda: datetime.now(UTC))
        marked = await bench.mine("version, in_doubt_since = 'epoch'", "connector_items")
        assert marked == [(2**62, True)]


async def test_a_document_missing_in_the_ledger_is_republished_once_earlier_messages_were_handled(
    bench: Bench,
) -> None:
    bench.world.fill(2)
    async with loaded(bench) as instance:
        for _ in range(2):  # nothing is known to have been handled since it was seen to be missing
            assert "not_accepted" not in await bench.ask("reconcile")
        assert (await compare_twice(bench)).get("not_accepted") == 2
        assert set(await published(bench, instance)) >= {("document.upserted", "d000"), ("document.upserted", "d001")}
        await accept(bench)
        bench.world.write("d002")
        await bench.ask("changes")
        await bench.take()
        await mark_everything_handled(bench)  # before d002 was seen to be missing: that proves nothing
        for _ in range(2):
            assert "not_accepted" not in await bench.ask("reconcile")
        await accept(bench)
        assert "not_accepted" not in await compare_twice(bench)
        assert await bench.take() == []


async def test_a_document_that_is_a_dead_letter_is_not_published_again(bench: Bench) -> None:
    bench.world.fill(1)
    async with loaded(bench):
        await put_letter(bench)
        assert "not_accepted" not in await compare_twice(bench)
        assert await bench.take() == []


@pytest.mark.parametrize("code", CODES)
async def test_dead_letters_of_forged_records_do_not_prevent_repair(bench: Bench, code: str) -> None:
    bench.world.fill(2)
    async with loaded(bench) as instance:
        await put_letter(bench, code)
        assert (await compare_twice(bench)).get("not_accepted") == 2
        assert ("document.upserted", "d000") in await published(bench, instance)
        await accept(bench)
        bench.world.remove("d000")
        await bench.ask("changes")
        assert kinds(await bench.take()) == [("document.deleted", "d000")]
        await bench.query("UPDATE dead_letters SET at = clock_timestamp() WHERE id = %s", f"{bench.tenant}:{code}")
        assert (await compare_twice(bench)).get("not_deleted") == 1


async def test_a_delete_missing_in_the_ledger_is_published_again(bench: Bench) -> None:
    bench.world.fill(2)
    async with loaded(bench) as instance:
        await accept(bench)
        bench.world.remove("d000")
        await bench.ask("changes")
        assert kinds(await bench.take()) == [("document.deleted", "d000")]
        assert (await compare_twice(bench)).get("not_deleted") == 1
        assert await published(bench, instance) == [("document.deleted", "d000")]


@pytest.mark.parametrize("letter", ["of the delete", "of an earlier event"])
async def test_a_delete_that_is_a_dead_letter_is_not_published_again(bench: Bench, letter: str) -> None:
    bench.world.fill(2)
    async with loaded(bench) as instance:
        await accept(bench)
        if letter == "of an earlier event":
            await put_letter(bench)
        bench.world.remove("d000")
        await bench.ask("changes")
        assert kinds(await bench.take()) == [("document.deleted", "d000")]
        if letter == "of the delete":
            await put_letter(bench)
            assert "not_deleted" not in await compare_twice(bench)
            await wait_until_idle(instance)
            assert await bench.take() == []
        else:  # that one does not say where the delete is
            assert (await compare_twice(bench)).get("not_deleted") == 1
            assert await published(bench, instance) == [("document.deleted", "d000")]


@asynccontextmanager
async def another_runner(bench: Bench) -> AsyncIterator[Instance]:
    """Another process runs the instance."""
    async with bench.running() as instance:
        await bench.until(lambda: "reconcile" in instance.activities)
        yield instance


async def test_a_connector_restarted_before_each_comparison_repairs_once_a_day(
    bench: Bench,
) -> None:
    """Differences that were seen and repaired are remembered by every later comparison."""
    a_day_passes = "UPDATE connector_differences SET repaired_at = repaired_at - interval '1 day' WHERE tenant = %s"
    bench.world.fill(1)
    async with loaded(bench):
        pass
    await mark_everything_handled(bench)
    async with another_runner(bench) as instance:
        assert (await bench.ask("reconcile")).get("not_accepted") == 1
        assert ("document.upserted", "d000") in await published(bench, instance)
    for _ in range(2):  # the ledger does not accept that one either
        async with another_runner(bench) as instance:
            await bench.ask("reconcile")
            await mark_everything_handled(bench)
            await wait_until_idle(instance)
            assert await bench.take() == []
    assert codes(instance) == {"ledger_differs"}
    await bench.query(a_day_passes, bench.tenant)
    async with another_runner(bench) as instance:
        assert (await bench.ask("reconcile")).get("not_accepted") == 1
        assert ("document.upserted", "d000") in await published(bench, instance)
    await accept(bench)
    await bench.query(a_day_passes, bench.tenant)
    async with another_runner(bench):
        assert await bench.ask("reconcile") == {"documents": 1, "principals": 0}
    assert await bench.mine("name", "connector_differences") == [], "what is mended is forgotten"


async def test_a_repair_requested_while_a_page_is_saved_is_not_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.world.fill(2)
    async with loaded(bench) as instance:
        await accept(bench)
        await put(bench, "d000", version=2**62)
        save, comparisons = Rows.save, []

        async def slow(rows: Rows, *arguments: Any, **named: Any) -> None:
            """The page has looked at its rows, found nothing to publish, and is about to write them."""
            monkeypatch.setattr(Rows, "save", save)
            comparisons.append(asyncio.create_task(bench.ask("reconcile")))
            await asyncio.wait(comparisons, timeout=3)
            await save(rows, *arguments, **named)

        monkeypatch.setattr(Rows, "save", slow)
        await bench.ask("document", "d000")
        assert (await comparisons[0]).get("newer") == 1
        assert ("document.upserted", "d000") in await published(bench, instance)


async def test_documents_that_recover_marks_while_a_page_is_saved_are_published_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.world.fill(1)
    async with loaded(bench):
        save = Rows.save

        async def slow(rows: Rows, *arguments: Any, **named: Any) -> None:
            """The page has found nothing to publish; Kafka has lost the document before anybody read it."""
            monkeypatch.setattr(Rows, "save", save)
            await republish(bench.pool)
            await save(rows, *arguments, **named)

        monkeypatch.setattr(Rows, "save", slow)
        await bench.ask("document", "d000")
        assert await bench.take() == []
    async with bench.running() as instance:
        await bench.until(lambda: "events" in instance.activities)
        assert ("document.upserted", "d000") in await published(bench, instance)


async def test_a_repair_requested_while_groups_are_published_is_not_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.world.groups = {"hr": ({"ann"}, set())}
    async with loaded(bench) as instance:
        await accept(bench)
        intend, comparisons = MembershipTables.intend, []

        async def slow(tables: MembershipTables, batch: Sequence[ChangedSet]) -> None:
            """The listing is read; meanwhile the ledger has something newer that this connector never published."""
            monkeypatch.setattr(MembershipTables, "intend", intend)
            await put_groups(bench, "ann", ["board"], datetime.now(UTC))
            comparisons.append(asyncio.create_task(bench.ask("reconcile")))
            await asyncio.wait(comparisons, timeout=3)
            await intend(tables, batch)

        monkeypatch.setattr(MembershipTables, "intend", slow)
        bench.world.groups = {"hr": ({"ann"}, set()), "it": ({"ann"}, set())}
        await bench.ask("groups")
        assert kinds(await bench.take()) == [("identity.changed", "ann")]  # stamped before what the ledger has
        assert (await comparisons[0]).get("member_unknown") == 1
        assert await published(bench, instance) == [("identity.changed", "ann")]
        await accept(bench)
        [(groups,)] = await bench.mine("groups", "memberships", "principal = 'ann'")
        assert sorted(groups) == ["hr", "it"]


async def test_a_principal_in_no_listing_loses_the_groups_that_only_the_ledger_knows(bench: Bench) -> None:
    bench.world.groups = {"hr": ({"ann"}, set())}
    async with loaded(bench) as instance:
        await accept(bench)
        await put_groups(bench, "eve", ["hr"], datetime.now(UTC))
        assert (await bench.ask("reconcile")).get("member_unknown") == 1
        assert await published(bench, instance) == [("identity.changed", "eve")]
        await accept(bench)
        assert await bench.mine("groups", "memberships", "principal = 'eve'") == [([],)]
        assert "member_unknown" not in await bench.ask("reconcile")


@pytest.mark.parametrize("lost", ["never accepted", "forgotten by a backup"])
async def test_memberships_missing_in_the_ledger_are_published_again(bench: Bench, lost: str) -> None:
    bench.world.groups = {"hr": ({"ann"}, set())}
    async with loaded(bench) as instance:
        if lost != "never accepted":
            await put_groups(bench, "ann", [], datetime(2020, 1, 1, tzinfo=UTC))
        assert (await compare_twice(bench)).get("member_not_accepted") == 1
        assert await published(bench, instance) == [("identity.changed", "ann")]


async def test_a_difference_that_one_repair_does_not_resolve_is_reported_instead_of_repeated(bench: Bench) -> None:
    bench.world.write("d000", version=3, revision="1")
    async with loaded(bench) as instance:
        await accept(bench)
        await put(bench, "d000", version=9)  # the source was restored, and counts from an earlier version again
        assert (await bench.ask("reconcile")).get("newer") == 1
        assert ("document.upserted", "d000") in await published(bench, instance)
        await put(bench, "d000", version=9)
        await bench.query("UPDATE connector_items SET version = 3 WHERE tenant = %s", bench.tenant)
        for _ in range(2):
            await bench.ask("reconcile")
        await wait_until_idle(instance)
        assert await bench.take() == []
        assert codes(instance) == {"ledger_differs"}


async def test_documents_of_other_sources_are_not_compared(bench: Bench) -> None:
    bench.world.fill(1)
    async with loaded(bench) as instance:
        await accept(bench)
        for source in ("folder", "canary", "mine"):
            await put(bench, "theirs", version=1, source=source)
        assert await bench.ask("reconcile") == {"documents": 1, "principals": 0}
        await bench.ask("sweep")
        await wait_until_idle(instance)
        assert await bench.take() == []


async def test_a_comparison_covers_all_pages_and_its_differences_are_counted_and_shown(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "PAGE", 2)
    bench.world.fill(7)
    bench.world.groups = {"hr": ({"ann", "ben", "cat"}, set())}
    async with loaded(bench) as instance:
        await accept(bench)
        assert await bench.ask("reconcile") == {"documents": 7, "principals": 3}
        for id_ in ("d000", "d006"):
            await put(bench, id_, version=2**62)
        await put_groups(bench, "zoe", ["hr"], datetime.now(UTC))
        await bench.ask("reconcile")
        registry = instance._services.metrics.registry
        await bench.until(
            lambda: (
                registry.get_sample_value(
                    "penstock_reconciliation_differences_total", {"source": SOURCE, "kind": "newer"}
                )
                == 2
            )
        )
        plan = Plan(name=SOURCE, tenant=bench.tenant, kind="world", make=lambda c: WorldSource(bench.world, c))
        row = (await summarize(bench.pool, plan)).row
    assert row is not None
    assert row.reconciliation is not None
    assert (row.reconciliation["found"], row.reconciliation["standing"]) == ({"newer": 2, "member_unknown": 1}, 0)
