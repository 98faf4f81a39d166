"""``penstock ingest`` and ``watch`` cut off after Kafka has their events and before their rows say so, while the files
change back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from connectors.clock import Clock
from connectors.folder.checkpoint import Checkpoint, Item
from connectors.runner.guard import MASS_DELETE_DOCUMENTS
from connectors.withdraw import Withdrawal
from pipeline.core.errors import Retryable
from pipeline.core.fold import State
from tests.support.connectors.folder_kit import Desk
from tests.support.pipeline.folded import fold_all
from topics.messages import AnyMessage

pytestmark = pytest.mark.stack

Change = Callable[[Desk], object]


async def _unconfirmed(*_: object) -> None:
    raise Retryable("checkpoint: no connection became free in time", service="postgres")


async def published(desk: Desk, monkeypatch: pytest.MonkeyPatch, before: Change, there: Change, back: Change) -> State:
    """Return the state of the ledger after everything that was sent: a change that is acknowledged, never confirmed,
    and then reverted."""
    sent: list[AnyMessage] = []
    before(desk)
    await desk.scan(allow_mass_delete=True)
    there(desk)
    with monkeypatch.context() as away:
        away.setattr(Checkpoint, "save", _unconfirmed)
        away.setattr(Checkpoint, "remove", _unconfirmed)
        with pytest.raises(Retryable):
            await desk.scan(allow_mass_delete=True)
    back(desk)
    await desk.scan(allow_mass_delete=True)
    sent += desk.recorder.take()
    await desk.scan(allow_mass_delete=True)
    assert desk.recorder.take() == [], "nothing is in doubt any more"
    [state] = fold_all(sent).values()
    return state


def write(text: str) -> Change:
    return lambda desk: desk.write("a.md", text)


def delete(desk: Desk) -> None:
    (desk.root / "a.md").unlink()


def nothing(desk: Desk) -> None:
    pass


def share(tag: str) -> Change:
    return lambda desk: desk.write(".penstock.toml", f'acl = ["{tag}"]\n')


async def test_an_unconfirmed_access_change_that_was_reverted_is_reverted_in_the_ledger(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.write("a.md", "text")
    state = await published(desk, monkeypatch, share("staff"), share("everyone"), share("staff"))
    assert [tag.rpartition("/")[2] for tag in state.acl_tags] == ["staff"]


async def test_a_file_deleted_after_an_unconfirmed_publication_is_deleted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = await published(desk, monkeypatch, nothing, write("text"), delete)
    assert not state.alive


async def test_a_file_restored_after_an_unconfirmed_deletion_is_published_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = await published(desk, monkeypatch, write("text"), delete, write("text"))
    assert state.alive


async def test_an_unconfirmed_edit_that_was_reverted_is_reverted_in_the_ledger(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = await published(desk, monkeypatch, write("before"), write("after"), write("before"))
    assert b"before" in (state.content_hash or b"")


async def test_a_scan_finishes_a_withdrawal_that_crashed_before_publishing(desk: Desk) -> None:
    """Whether the file is still there or not, and although much is gone at once."""
    there, gone = desk.write("there.md"), desk.write("gone.md")
    await desk.scan()
    desk.recorder.take()
    with pytest.raises(AssertionError):
        await Withdrawal(desk.checkpoint.pool, None, desk.tenant, "folder").documents([str(there), str(gone)])
    gone.unlink()
    await desk.scan()
    assert desk.names(desk.recorder.take()) == [("deleted", "gone.md"), ("deleted", "there.md")]
    await desk.scan()
    assert desk.recorder.take() == []


async def test_a_file_that_is_withdrawn_while_a_scan_with_a_fast_clock_reads_it_is_not_published(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its content was newer than the delete, and searchable until the next scan."""
    path = desk.write("a.md")
    await desk.scan()
    listed, withdrawn = Checkpoint.listed, False

    async def withdrawn_after_listing(self: Checkpoint, *scope: Any) -> dict[str, Item]:
        nonlocal withdrawn
        rows = await listed(self, *scope)
        if not withdrawn:
            withdrawn = True
            await Withdrawal(self.pool, desk.recorder, desk.tenant, "folder").documents([str(path)])
        return rows

    monkeypatch.setattr(Checkpoint, "listed", withdrawn_after_listing)
    path.write_text("edited")
    connector = desk.connector()
    connector._clock = Clock(datetime.now(UTC) + timedelta(minutes=3))
    await connector.scan()
    sent = desk.recorder.take()
    assert not fold_all(sent)[str(path)].alive
    await connector.scan()
    assert not fold_all([*sent, *desk.recorder.take()])[str(path)].alive
    await connector.scan()
    assert desk.recorder.take() == []


async def test_a_withdrawn_file_that_was_missing_for_one_scan_stays_withdrawn(desk: Desk) -> None:
    desk.write("kept.md")
    path = desk.write("a.md")
    await desk.scan()
    await Withdrawal(desk.checkpoint.pool, desk.recorder, desk.tenant, "folder").documents([str(path)])
    desk.recorder.take()
    path.unlink()
    await desk.scan()
    desk.write("a.md", "back again")
    await desk.scan()
    assert desk.recorder.take() == []


async def test_withdrawn_files_do_not_count_towards_the_mass_deletion_guard(desk: Desk) -> None:
    """The guard against deleting much at once asks how many of the published documents are gone."""
    withdrawn = [desk.write(f"withdrawn{n}.md") for n in range(MASS_DELETE_DOCUMENTS)]
    other = desk.write("other.md")
    desk.write("kept.md")
    await desk.scan()
    await Withdrawal(desk.checkpoint.pool, desk.recorder, desk.tenant, "folder").documents([str(p) for p in withdrawn])
    desk.recorder.take()
    for path in [*withdrawn, other]:
        path.unlink()
    report = await desk.scan()
    assert (report.problems, desk.names(desk.recorder.take())) == ([], [("deleted", "other.md")])


async def test_a_file_withdrawn_before_its_first_scan_gets_the_scope_of_its_root(desk: Desk) -> None:
    path = desk.write("a.md")
    await Withdrawal(desk.checkpoint.pool, desk.recorder, desk.tenant, "folder").documents([str(path)])
    await desk.scan()
    async with desk.checkpoint.pool.connection() as connection:
        rows = await connection.execute("SELECT scope FROM connector_items WHERE tenant = %s", [desk.tenant])
        assert await rows.fetchall() == [(str(desk.root),)]
