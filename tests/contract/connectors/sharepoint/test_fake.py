"""Every exchange of the connector and the fake is held to Microsoft's published schema of Graph."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

from connectors.fakes.graph import FakeGraph
from connectors.fakes.graph_tenant import Grant
from connectors.source import Document, Reaction, Unreadable
from tests.support.connectors.graph_schema import RESPONSES, Recorder, violations
from tests.support.connectors.reading import changed, everything, groups, listing
from tests.support.connectors.sharepoint_kit import Office, office_in


def furnish(office: Office) -> None:
    """Add something of everything that is shown in its own way."""
    tenant = office.tenant
    tenant.group("nested", office.otto)
    tenant.groups[office.staff].members.add(tenant.group("inner", office.otto))
    tenant.groups[office.staff].is_unified = True
    tenant.groups[office.staff].owners.add(office.ines)
    office.site.groups = {5: [office.fake.group_claim(office.staff), "i:0#.f|membership|otto@contoso.com"]}
    tenant.share(
        tenant.root(office.drive),
        [
            Grant(site_group=5, role="write"),
            Grant(user=office.ines, role="owner"),
            Grant(group=office.staff),
            Grant(owners=office.staff, role="owner"),
            Grant(claim="c:0(.s|true"),
            Grant(link="users", link_users=(office.otto,)),
            Grant(link="organization"),
            Grant(user=office.otto, expires=tenant.now() + timedelta(days=9)),
        ],
    )
    folder = office.folder_in(grants=[Grant(user=office.otto)])
    office.file("private.txt", parent=folder)
    office.file("draft.txt", version="0.3")
    office.file("virus.txt", malware="EICAR")
    office.file("notebook", package="oneNote")
    office.file("shortcut.txt", is_shortcut=True)
    for number in range(5):
        office.file(f"filler {number}.txt")
    pages = tenant.drive(office.site, "Site Pages", Grant(group=office.staff), pages=True)
    tenant.add(
        "Home.aspx",
        drive=pages,
        page={
            "title": "Home",
            "canvasLayout": {
                "horizontalSections": [
                    {
                        "id": "1",
                        "layout": "oneColumn",
                        "columns": [
                            {
                                "id": "1",
                                "width": 12,
                                "webparts": [
                                    {
                                        "@odata.type": "#microsoft.graph.textWebPart",
                                        "id": "f6d0ef70-c977-45e4-ae4b-4676a30d5aab",
                                        "innerHtml": "<p>Welcome.</p>",
                                    }
                                ],
                            }
                        ],
                    }
                ]
            },
        },
    )
    personal = tenant.site("/personal/otto_contoso_com", personal=True)
    tenant.drive(personal, "Documents", Grant(user=office.otto, role="owner"))


async def test_every_exchange_matches_microsofts_published_schema(tmp_path: Path) -> None:
    recorders: list[Recorder] = []

    def around(fake: FakeGraph) -> Recorder:
        recorders.append(Recorder(fake))
        return recorders[0]

    async with office_in(tmp_path, around) as office:
        furnish(office)
        source = office.source(
            all_sites=True, onedrives=["otto@contoso.com"], page_size=3, sweep_page_size=4, organization_links=True
        )
        cursor = await source.start()
        read = await everything(source)
        assert set(await listing(source)) == set(read)
        assert {type(entry) for entry in read.values()} == {Document, Unreadable}
        tags = await groups(source)
        assert {"everyone", f"owners:{office.staff}"} <= tags.keys()
        gone, shared = sorted(read)[:2]
        office.tenant.delete(gone.partition(":")[2])
        office.tenant.share(shared.partition(":")[2], [Grant(user=office.ines)])
        await changed(source, cursor)
        await source.fetch([gone, shared, f"{office.drive}:01NONE"])
        await source.check()
        await _subscribe(office)
        office.fake.faults.throttled = 1
        await listing(source)
        [recorder] = recorders
        assert recorder.wrong == []
        assert set(recorder.judged) == {f"{method} {pattern}" for method, pattern in RESPONSES}


async def _subscribe(office: Office) -> None:
    """Create subscriptions, prolong them, and delete those that are no longer needed."""

    async def ignored(reaction: Reaction) -> None:
        return None

    def listen(**options: object) -> asyncio.Task[None]:
        return asyncio.create_task(office.source(**options).listen(ignored))

    async def until(method: str, part: str) -> None:
        async with asyncio.timeout(30):
            while not any(m == method and part in path for m, path in office.fake.requests):
                await asyncio.sleep(0.01)

    listening = listen(onedrives=["otto@contoso.com"])
    async with asyncio.timeout(30):
        while len(office.memory.stored.get("subscriptions", ())) < 3:
            await asyncio.sleep(0.01)
    listening.cancel()
    office.tenant.advance(timedelta(days=28))
    listening = listen()
    await until("PATCH", "/subscriptions/")
    await until("DELETE", "/subscriptions/")
    listening.cancel()


def test_the_schema_finds_what_does_not_belong() -> None:
    item = {
        "id": "1",
        "name": "a",
        "size": 3,
        "lastModifiedDateTime": "2026-01-01T00:00:00Z",
        "file": {"mimeType": "a"},
    }
    assert list(violations(item, "microsoft.graph.driveItem")) == []
    for name, value in [("sise", 3), ("size", "3"), ("lastModifiedDateTime", "today"), ("file", {"type": "a"})]:
        assert list(violations({**item, name: value}, "microsoft.graph.driveItem")), name
