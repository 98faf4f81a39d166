"""The playground of SharePoint for the contract suite: a fake tenant with one site, in which each document has a folder
of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from connectors.fakes.graph import CLIENT, FakeGraph
from connectors.fakes.graph_tenant import TENANT, Grant, Tenant
from connectors.fakes.misbehaviour import Misbehaving
from connectors.source import Request
from pipeline.runtime.http_server import served

CERTIFICATE_VARIABLE = "SHAREPOINT_CERTIFICATE"
OWNERS, MEMBERS = 3, 5
"""The numbers of the site's groups."""


class SharePointPlayground:
    inside = "ines@contoso.com"
    outside = "otto@contoso.com"

    def __init__(self, fake: FakeGraph, url: str, sharepoint_url: str, misbehaving: Misbehaving) -> None:
        """url, sharepoint_url: where the fake serves Graph, and SharePoint."""
        self.fake = fake
        self.misbehaving = misbehaving
        fake.connect(url, sharepoint_url)
        tenant = fake.tenant
        self.ines, _, sam = (tenant.user(mail) for mail in (self.inside, self.outside, "sam@contoso.com"))
        self.staff = tenant.group("staff", self.ines, sam, unified=True)
        tenant.groups[self.staff].owners.add(sam)
        site = tenant.site("/sites/company")
        site.groups = {
            OWNERS: [fake.group_claim(self.staff, owners=True)],
            MEMBERS: [fake.group_claim(self.staff), f"i:0#.f|membership|{tenant.users[sam].upn}"],
        }
        grants = Grant(site_group=OWNERS, role="owner"), Grant(site_group=MEMBERS, role="write")
        self.drive = tenant.drive(site, "Documents", *grants)
        self.archive = tenant.add("Archive", drive=self.drive, folder=True).id
        self.items: dict[str, str] = {}
        self.options: Mapping[str, Any] = {
            "tenant_id": TENANT,
            "client_id": CLIENT,
            "certificate": {"env": CERTIFICATE_VARIABLE},
            "sites": [site.url],
            "page_size": 3,
            "sweep_page_size": 3,
            "login_url": url,
            "graph_url": url,
            "sharepoint_url": sharepoint_url,
            "hosts": [urlsplit(sharepoint_url).netloc],
        }
        self.environment: Mapping[str, str] = {CERTIFICATE_VARIABLE: fake.certificate}

    async def write(self, name: str, text: str) -> str:
        tenant = self.fake.tenant
        if name in self.items:
            tenant.edit(self.items[name], text.encode())
        else:
            folder = tenant.add(f"{name} (folder)", drive=self.drive, folder=True)
            item = tenant.add(f"{name}.txt", drive=self.drive, parent=folder.id, content=text.encode())
            self.items[name] = item.id
        return f"{self.drive}:{self.items[name]}"

    async def move(self, name: str) -> None:
        self.fake.tenant.move(self.items[name], self.archive)
        self.fake.tenant.rename(self.items[name], f"{name}, moved.txt")

    async def relabel(self, name: str) -> None:
        """Move it to another folder."""
        self.fake.tenant.move(self.items[name], self.archive)

    async def remove(self, name: str) -> None:
        self.fake.tenant.delete(self.items[name])

    async def restore(self, name: str) -> None:
        self.fake.tenant.delete(self.items[name], deleted=False)

    async def restrict(self, name: str) -> None:
        """Restrict the folder above: the log of changes names that folder only."""
        folder = self.fake.tenant.items[self.items[name]].parent
        assert folder is not None
        self.fake.tenant.share(folder, [Grant(site_group=OWNERS, role="owner")])

    async def leave(self) -> None:
        self.fake.tenant.groups[self.staff].members.discard(self.ines)

    async def add_places(self) -> Mapping[str, str]:
        """Add the site ``vault`` with a library and the file ``far``, also to the options. Returns the ids of the file,
        of the site (``vault``) and of its library (``library``)."""
        tenant = self.fake.tenant
        site = tenant.site("/sites/vault")
        site.groups = {MEMBERS: [self.fake.group_claim(self.staff)]}
        library = tenant.drive(site, "Documents", Grant(site_group=MEMBERS, role="write"))
        far = tenant.add("far.txt", drive=library, content=b"About far.").id
        self.options = {**self.options, "sites": [*self.options["sites"], site.url]}
        return {"far": f"{library}:{far}", "vault": site.id, "library": library}

    def sent(self) -> Sequence[Request]:
        return [Request({"content-type": "application/json"}, {}, body) for body in self.fake.take()]

    def forged(self, request: Request) -> Request:
        """Replace the secret of the subscription by another."""
        body = json.loads(request.body)
        for notification in body["value"]:
            notification["clientState"] = "forged"
        return replace(request, body=json.dumps(body).encode())

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        self.fake.faults.throttled = throttled
        self.fake.faults.failing = failing
        self.fake.faults.truncated = truncated
        if expired:
            self.fake.epoch += 1


@asynccontextmanager
async def playing() -> AsyncIterator[SharePointPlayground]:
    fake = FakeGraph(Tenant(lambda: datetime.now(UTC)))
    misbehaving = Misbehaving(fake)
    async with served(misbehaving) as url, served(fake.sharepoint) as sharepoint_url:
        yield SharePointPlayground(fake, url, sharepoint_url, misbehaving)
