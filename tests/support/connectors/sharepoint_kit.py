"""A SharePoint connector at a fake tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from connectors.conform.memory_runner import InMemory
from connectors.fakes.graph import CLIENT, SECRET, FakeGraph
from connectors.fakes.graph_tenant import TENANT, Grant, Site, Tenant
from connectors.sharepoint import SharePoint, SharePointOptions
from connectors.source import Context
from connectors.web import Limits
from pipeline.runtime.http_server import served

EVENTS = "https://penstock.example.com/v1/events/sharepoint"


class Office:
    """A company with one site, ``/sites/company``, whose library is shared with the staff."""

    def __init__(self, fake: FakeGraph, url: str, sharepoint_url: str, folder: Path) -> None:
        self.fake, self.url, self.sharepoint_url, self.folder = fake, url, sharepoint_url, folder
        fake.connect(url, sharepoint_url)
        self.memory = InMemory()
        self.ines, self.otto = (self.tenant.user(f"{name}@contoso.com") for name in ("ines", "otto"))
        self.staff = self.tenant.group("staff", self.ines)
        self.site: Site = self.tenant.site("/sites/company")
        self.drive = self.tenant.drive(self.site, "Documents", Grant(group=self.staff))
        self._open: list[SharePoint] = []

    @property
    def tenant(self) -> Tenant:
        return self.fake.tenant

    def file(self, name: str, text: str = "Some text.", **more: Any) -> str:
        """Add a text file. Returns its external id."""
        item = self.tenant.add(name, **{"drive": self.drive, "content": text.encode(), **more})
        return f"{item.drive}:{item.id}"

    def folder_in(self, **more: Any) -> str:
        return self.tenant.add("Folder", drive=self.drive, folder=True, **more).id

    def source(self, *, patient: bool = True, certificate: bool = True, **options: Any) -> SharePoint:
        """Instances share what is stored, as after a restart. patient: failures are tried again."""
        credential = {"certificate": self.fake.certificate} if certificate else {"client_secret": SECRET}
        values = {
            "tenant_id": TENANT,
            "client_id": CLIENT,
            "sites": [self.site.url],
            "login_url": self.url,
            "graph_url": self.url,
            "sharepoint_url": self.sharepoint_url,
            "hosts": [urlsplit(self.sharepoint_url).netloc],
            **credential,
            **options,
        }
        context = Context(name="sharepoint", tenant="acme", memory=self.memory, folder=self.folder, events_url=EVENTS)
        limits = Limits(patience_seconds=60 if patient else 0)
        source = SharePoint(SharePointOptions(**values), context, now=self.tenant.now, limits=limits)
        self._open.append(source)
        return source

    async def close(self) -> None:
        for source in self._open:
            await source.close()


@asynccontextmanager
async def office_in(folder: Path, around: Callable[[FakeGraph], Any] = lambda fake: fake) -> AsyncIterator[Office]:
    """around: wraps the fake's application, such as in a recorder."""
    fake = FakeGraph()
    async with served(around(fake)) as url, served(fake.sharepoint) as sharepoint_url:
        office = Office(fake, url, sharepoint_url, folder)
        try:
            yield office
        finally:
            await office.close()
