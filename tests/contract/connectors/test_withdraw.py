"""An operator takes documents, sources and tenants out of the index, although the source still has them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

import pytest

from cli.withdraw import the_document
from connectors import withdraw
from connectors.runner.compare import Row
from connectors.runner.publish import Publisher
from connectors.runner.rows import LeaseLost, Rows
from connectors.runner.state import lease
from connectors.source import Document
from connectors.withdraw import Extent, Withdrawal
from pipeline.core.errors import Misconfigured, PenstockError
from pipeline.core.fold import MAX_AHEAD, State
from pipeline.core.identity import document_id
from tests.support.connectors.runner_kit import Bench, kinds
from tests.support.pipeline.folded import fold_all

pytestmark = pytest.mark.stack


def withdrawal(bench: Bench) -> Withdrawal:
    return Withdrawal(bench.pool, bench.producer, bench.tenant, bench.name)


async def ledger(bench: Bench) -> dict[str, State]:
    """Return the state of the ledger after everything that was published so far."""
    await bench.take()
    return fold_all(bench.taken)


async def test_a_withdrawn_document_stays_deleted_although_the_source_changes_it(bench: Bench) -> None:
    bench.world.fill(3)
    async with bench.loaded():
        await withdrawal(bench).documents(["d001"])
        assert kinds(await bench.take()) == [("document.deleted", "d001")]
        bench.world.write("d001", "another text")
        await bench.ask("changes")
        await bench.ask("sweep")
        await bench.ask("full")
        assert await bench.take() == []
        assert not (await ledger(bench))["d001"].alive
        assert await withdrawal(bench).undo(["d001"]) == 1
        await bench.ask("sweep")
        assert (await ledger(bench))["d001"].alive


async def test_a_sweep_deletes_a_withdrawn_document_that_was_published_concurrently(bench: Bench) -> None:
    """Its row says "published" then; the listing alone is enough."""
    bench.world.fill(2)
    async with bench.loaded():
        await withdrawal(bench).documents(["d001"])
        await bench.take()
        await bench.query(
            "UPDATE connector_items SET gone = false, fingerprint = 'x' WHERE tenant = %s AND external_id = 'd001'",
            bench.tenant,
        )
        await bench.ask("sweep")
        assert kinds(await bench.take()) == [("document.deleted", "d001")]


async def test_a_document_that_a_runner_with_a_fast_clock_has_just_read_is_not_published_after_its_withdrawal(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its content was newer than the delete, by the minutes that the clock was ahead: it stayed searchable until the
    next sweep, although the command had said that it was withdrawn."""
    bench.world.fill(2)
    async with bench.loaded():
        pass
    async with lease(bench.postgres, bench.tenant, bench.name, "world") as held:
        rows = Rows(bench.pool, held.holder)
        find, reads = rows.find, 0

        async def withdrawn_after_reading(ids: Collection[str]) -> dict[str, Row]:
            nonlocal reads
            known, reads = await find(ids), reads + 1
            if reads == 1:
                await withdrawal(bench).documents(["d001"])
            return known

        monkeypatch.setattr(rows, "find", withdrawn_after_reading)
        entries = [
            Document(external_id=name, title="T", content="edited", acl_tags=["staff"]) for name in ("d000", "d001")
        ]
        ahead = datetime.now(UTC) + timedelta(minutes=3)
        await Publisher(bench.producer, rows).publish(entries, ahead, "live")
    assert kinds(await bench.take())[0] == ("document.deleted", "d001")
    states = await ledger(bench)
    assert (states["d000"].alive, states["d001"].alive) == (True, False)


@pytest.mark.parametrize("seconds", [150, 243, 86_400])
async def test_a_document_of_a_process_whose_clock_is_ahead_is_withdrawn(bench: Bench, seconds: int) -> None:
    """Refused as long as the clock was more than four minutes ahead ("this machine's clock is behind"); and where a
    failover of Postgres had undone what a source remembers of its stamps, the delete was older than the content."""
    bench.world.fill(2)
    async with bench.loaded():
        pass
    now = datetime.now(UTC)
    sent, accepted = now + timedelta(seconds=seconds), now + timedelta(seconds=min(seconds, 150))
    await bench.query(
        "INSERT INTO documents (id, tenant, source, external_id, version, observed_at)"
        " VALUES (%s, %s, %s, 'd001', %s, %s)",
        document_id(bench.tenant, bench.name, "d001"),
        bench.tenant,
        bench.name,
        2**62,
        accepted,
    )
    if seconds > 200:
        await bench.query("UPDATE connector_sources SET observed_at = %s WHERE tenant = %s", sent, bench.tenant)
    stamp = await withdrawal(bench).documents(["d001"])
    assert kinds(await bench.take()) == [("document.deleted", "d001")]
    assert stamp > (sent if seconds < MAX_AHEAD.total_seconds() else accepted)
    assert stamp < datetime.now(UTC) + MAX_AHEAD, "it would be refused"


async def test_a_withdrawal_on_a_machine_whose_clock_is_far_behind_is_refused(bench: Bench) -> None:
    """It waited until its clock had reached the document's time: for a day where the clock was a day behind."""
    accepted = datetime.now(UTC) + timedelta(days=1)
    await bench.query(
        "INSERT INTO documents (id, tenant, source, external_id, version, observed_at)"
        " VALUES (%s, %s, %s, 'd001', 1, %s)",
        document_id(bench.tenant, bench.name, "d001"),
        bench.tenant,
        bench.name,
        accepted,
    )
    async with asyncio.timeout(30):
        with pytest.raises(Misconfigured, match="this machine's clock is behind"):
            await withdrawal(bench).documents(["d001"])
    assert await bench.take() == []


async def test_the_runner_publishes_the_delete_of_a_withdrawal_command_that_crashed(bench: Bench) -> None:
    bench.world.fill(2)
    async with bench.loaded():
        with pytest.raises(AssertionError):
            await Withdrawal(bench.pool, None, bench.tenant, bench.name).documents(["d001"])
        assert await bench.take() == []
        await bench.ask("sweep")
        assert kinds(await bench.take()) == [("document.deleted", "d001")]


async def test_a_removed_connector_publishes_nothing_until_resumed_and_then_reads_all_again(bench: Bench) -> None:
    bench.world.fill(3)
    bench.world.groups["staff"] = ({"ann"}, set())
    async with bench.loaded() as instance:
        gone = withdrawal(bench)
        assert await gone.extent() == Extent(3, 1)
        await gone.remove()
        bench.world.write("d000", "written after the removal")
        assert await gone.whole() == Extent(3, 1)
        await bench.until(lambda: "was removed" in (instance.start.reason or ""))
        assert kinds(await bench.take()) == [
            ("document.deleted", "d000"),
            ("document.deleted", "d001"),
            ("document.deleted", "d002"),
            ("identity.changed", "ann"),
        ]
        assert not any(state.alive for state in (await ledger(bench)).values())
        assert await gone.extent() == Extent(0, 0)
        assert await gone.whole() == Extent(0, 0), "the same again sends nothing"
    with pytest.raises(LeaseLost, match="penstock connector resume wiki"):
        async with lease(bench.postgres, bench.tenant, bench.name, "world"):
            pass
    await bench.query("UPDATE connectors SET removed_at = NULL WHERE tenant = %s", bench.tenant)
    async with bench.running() as again:
        await bench.until(lambda: bench.done(again, "full", "groups"))
        ledger_rows = await ledger(bench)
        assert [state.alive for state in ledger_rows.values()] == [True] * 3
        assert ("identity.changed", "ann") in kinds(bench.taken[-5:])


async def test_files_of_a_removed_connector_are_deleted_unless_it_still_has_uploads(bench: Bench) -> None:
    """A clone of a repository stayed after `forget source`, with every text that it ever had."""
    bench.world.fill(1)
    async with bench.loaded() as instance:
        kept = bench.folder / bench.name / "mirror.git" / "objects"
        kept.mkdir(parents=True)
        (kept / "pack").write_text("a name")
        await bench.query(
            "INSERT INTO uploads (id, tenant, source, external_id, version, file_name, sha256, size, acl_tags,"
            " required_tags, metadata, changed)"
            " VALUES (gen_random_uuid(), %s, %s, 'a', 1, 'a', '', 1, '{}', '{}', '{}', 1)",
            bench.tenant,
            bench.name,
        )
        await withdrawal(bench).remove()
        await bench.until(lambda: "was removed" in (instance.start.reason or ""))
    async with bench.running() as again:
        await bench.until(lambda: "was removed" in (again.start.reason or ""))
        assert (kept / "pack").exists(), "an original is looked for by its row"
        await bench.query("DELETE FROM uploads WHERE tenant = %s", bench.tenant)
    async with bench.running():
        await bench.until(lambda: not (bench.folder / bench.name).exists())
    assert bench.folder.exists()


async def test_documents_known_only_to_the_ledger_are_withdrawn(bench: Bench) -> None:
    """A publisher of one's own has no rows."""
    await bench.query(
        "INSERT INTO documents (id, tenant, source, external_id, version, observed_at) VALUES"
        " (gen_random_uuid(), %s, 'theirs', 'page', 7, now())",
        bench.tenant,
    )
    theirs = Withdrawal(bench.pool, bench.producer, bench.tenant, "theirs")
    assert await withdraw.sources_of(bench.pool, bench.tenant) == ["theirs"]
    await theirs.remove()
    assert await theirs.whole() == Extent(1, 0)
    assert kinds(await bench.take()) == [("document.deleted", "page")]


async def test_documents_gone_for_the_connector_but_alive_in_the_ledger_are_withdrawn(bench: Bench) -> None:
    """As after a delete that was refused, or a ledger from a backup."""
    await bench.query(
        "INSERT INTO documents (id, tenant, source, external_id, version, observed_at)"
        " VALUES (gen_random_uuid(), %s, 'wiki', 'page', 7, now())",
        bench.tenant,
    )
    await bench.query(
        "INSERT INTO connector_items (tenant, source, external_id, scope, version, gone, content_at)"
        " VALUES (%s, 'wiki', 'page', '', 7, true, now())",
        bench.tenant,
    )
    assert await Withdrawal(bench.pool, bench.producer, bench.tenant, "wiki").whole() == Extent(1, 0)
    assert kinds(await bench.take()) == [("document.deleted", "page")]


async def test_a_withdrawn_documents_name_never_resolves_to_another_document(bench: Bench) -> None:
    """A name is not matched by its end, by a title, or by a source that has the name of its folder."""
    tenant = bench.tenant
    mine = document_id(tenant, "wiki", "hr/notes.md")
    for id_, source, name, title in (
        (mine, "wiki", "hr/notes.md", None),
        (document_id(tenant, "wiki", "old/hr/notes.md"), "wiki", "old/hr/notes.md", None),
        (document_id(tenant, "wiki", "page"), "wiki", "page", "hr/notes.md"),
        (document_id(tenant, "hr", "notes.md"), "hr", "notes.md", None),
    ):
        await bench.query(
            "INSERT INTO documents (id, tenant, source, external_id, title, version, observed_at)"
            " VALUES (%s, %s, %s, %s, %s, 1, now())",
            id_,
            tenant,
            source,
            name,
            title,
        )
    assert await the_document(bench.pool, tenant, "hr/notes.md", None) == (mine, "wiki", "hr/notes.md", False)
    assert await the_document(bench.pool, tenant, str(mine), None) == (mine, "wiki", "hr/notes.md", False)
    await bench.query(
        "UPDATE documents SET erased_at = now(), deleted_at = now(), external_id = 'erased:' || id WHERE id = %s", mine
    )
    for name in ("hr/notes.md", str(mine)):
        again = await the_document(bench.pool, tenant, name, None)
        assert (again.id, again.erased) == (mine, True)
    with pytest.raises(PenstockError, match="no document"):
        await the_document(bench.pool, tenant, "otes.md", None)
    await bench.query(
        "INSERT INTO documents (id, tenant, source, external_id, version, observed_at)"
        " VALUES (%s, %s, 'hr', 'hr/notes.md', 1, now())",
        document_id(tenant, "hr", "hr/notes.md"),
        tenant,
    )
    with pytest.raises(PenstockError, match="--source"):
        await the_document(bench.pool, tenant, "hr/notes.md", None)
    assert (await the_document(bench.pool, tenant, "hr/notes.md", "wiki")).erased


async def test_a_source_name_of_two_tenants_requires_the_tenant_option(bench: Bench) -> None:
    bench.name = "shared"
    for tenant in (bench.tenant, f"{bench.tenant}-b"):
        await bench.query("INSERT INTO connectors (tenant, source, kind) VALUES (%s, 'shared', 'world')", tenant)
    with pytest.raises(PenstockError, match="--tenant"):
        await withdraw.tenant_of(bench.pool, "shared", None)
    assert await withdraw.tenant_of(bench.pool, "shared", bench.tenant) == bench.tenant
    with pytest.raises(PenstockError, match="has ever run"):
        await withdraw.tenant_of(bench.pool, "nobody", None)
