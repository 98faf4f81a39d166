"""Readers of recorded payloads: each passes one through the connector's own code."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.contract.payloads.readers import confluence, github, sharepoint, slack, website
from tests.contract.payloads.readers.base import Reader, replay

VENDORS: Mapping[str, Any] = {
    "confluence": confluence,
    "github": github,
    "sharepoint": sharepoint,
    "slack": slack,
    "website": website,
}


@asynccontextmanager
async def readers() -> AsyncIterator[Mapping[str, Reader]]:
    """Yield the readers of all vendors by name, at one server."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(replay())
        result: dict[str, Reader] = {}
        for name, vendor in VENDORS.items():
            inner = await stack.enter_async_context(vendor.readers(server))
            result |= {f"{name} {kind}": reader for kind, reader in inner.items()}
        yield result
