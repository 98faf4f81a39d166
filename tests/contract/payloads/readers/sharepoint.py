"""Microsoft Graph: items and permissions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from pydantic import SecretStr

from connectors.sharepoint import SharePointOptions, content
from connectors.sharepoint.access import Sharing, tags_of
from connectors.sharepoint.client import Credential, Graph
from tests.contract.payloads.readers.base import IMPATIENT, Outcome, Reader, Replay
from tests.contract.payloads.sources import Payload

OPEN = Sharing(organization_links=True, anonymous_links=True)


@asynccontextmanager
async def readers(server: Replay) -> AsyncIterator[Mapping[str, Reader]]:
    options = SharePointOptions(
        tenant_id="contoso.example",
        client_id="client",
        client_secret=SecretStr("secret"),
        all_sites=True,
        login_url=server.url,
        graph_url=server.url,
        sharepoint_url=server.url,
    )
    graph = Graph(options, Credential(options), "sharepoint", IMPATIENT)

    async def item(payload: Payload) -> Outcome:
        server.load(payload, json.dumps({"value": [payload.value]}).encode())
        [row] = (await graph.delta("drive", None, 50))["value"]
        drive = str((row.get("parentReference") or {}).get("driveId"))
        kind = content.type_of(row, is_pages_library=False)
        changed = content.modified_at(row)
        assert content.revision_of(row, drive)
        assert isinstance(content.metadata(row, drive), Mapping)
        facts = {
            "author": content.author(row),
            "modified": changed.isoformat() if changed else None,
            "is_read": kind is not None,
            "size": row.get("size"),
        }
        return Outcome(facts)

    async def permission(payload: Payload) -> Outcome:
        closed, open_ = (sorted(tags_of(payload.value, "site", sharing)) for sharing in (Sharing(), OPEN))
        assert set(closed) <= set(open_)
        return Outcome({"tags": " ".join(open_)})

    try:
        yield {"item": item, "permission": permission}
    finally:
        await graph.close()
