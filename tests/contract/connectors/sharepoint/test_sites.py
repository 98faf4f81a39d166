"""Sites that Microsoft refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connectors.conform.memory_runner import MemoryRunner
from connectors.fakes.graph import FakeGraph
from connectors.fakes.graph_tenant import Grant
from connectors.fakes.misbehaviour import Fault, Misbehaving
from connectors.set_aside import SetAside
from connectors.source import Unreadable
from pipeline.core.errors import Misconfigured
from tests.support.connectors.sharepoint_kit import Office, office_in

FILES = 30
"""The files of the refused site: more, and a larger share, than the guard against mass deletion permits."""


Setting = tuple[Office, Misbehaving]


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    wrapped: list[Misbehaving] = []

    def around(fake: FakeGraph) -> Misbehaving:
        wrapped.append(Misbehaving(fake))
        return wrapped[0]

    async with office_in(tmp_path, around) as office:
        yield office, wrapped[0]


def refused(pattern: str, status: int) -> Fault:
    return Fault(request=pattern, status=status, body='{"error": {"code": "notAllowed", "message": "Blocked."}}')


async def test_a_locked_site_hides_its_files_and_stops_no_deletion_elsewhere(setting: Setting) -> None:
    office, misbehaving = setting
    vault = office.tenant.site("/sites/vault")
    drive = office.tenant.drive(vault, "Documents", Grant(group=office.staff))
    files = {office.file(f"{n}.txt", drive=drive) for n in range(FILES)}
    kept, removed = office.file("kept.txt"), office.file("removed.txt")
    sites = [office.site.url, vault.url]
    runner = MemoryRunner(office.source(sites=sites), SetAside())
    assert await runner.full()
    assert runner.published.keys() == files | {kept, removed}

    misbehaving.show([refused(f"GET /v1.0/sites/{vault.id}/", 423)], {})
    office.tenant.delete(removed.partition(":")[2])
    runner.source = office.source(sites=sites)  # after a restart
    assert await runner.sweep(), runner.status
    assert runner.deleted == [removed]
    assert {id_ for id_, document in runner.published.items() if document.acl_tags} == {kept}
    assert "is set aside" in runner.status
    [entry] = await runner.source.fetch([min(files)])
    assert isinstance(entry, Unreadable)
    assert entry.acl_tags == ()

    misbehaving.show((), {})
    assert await runner.sweep(), runner.status
    assert all(document.acl_tags for document in runner.published.values())
    assert not runner.set_aside.reasons()


async def test_a_token_that_is_refused_everywhere_changes_nothing(setting: Setting) -> None:
    office, misbehaving = setting
    office.file("a.txt")
    source = office.source()
    misbehaving.show([refused("GET /v1.0/", 401)], {})
    with pytest.raises(Misconfigured, match="rejects all tokens"):
        await source.start()
