"""Sitemaps and feeds."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from connectors.web import Web
from connectors.website.listings import MAX_LISTING_BYTES, normalised, parse
from tests.contract.payloads.readers.base import IMPATIENT, Outcome, Reader, Replay
from tests.contract.payloads.sources import Payload
from tests.contract.payloads.visible import addresses

ADDRESS = "https://site.example/dir/list.xml"
"""The address from which each listing is said to come: its relative addresses are resolved against it."""


@asynccontextmanager
async def readers(server: Replay) -> AsyncIterator[Mapping[str, Reader]]:
    web = Web(server.url, name="web", limits=IMPATIENT)

    async def listing(payload: Payload) -> Outcome:
        """Read a listing. Any address of an entry that it lacks is lost, and so is one that it has in addition."""
        server.load(payload)
        fetched = await web.fetch("/list.xml", max_bytes=MAX_LISTING_BYTES)
        listing = parse(fetched.body, ADDRESS)
        read = {*listing.pages, *listing.sitemaps}
        named = {url for text in addresses(payload.body) if (url := normalised(text, ADDRESS))}
        return Outcome({"pages": len(read)}, sorted(read ^ named))

    async def based(payload: Payload) -> Outcome:
        """Read a feed whose addresses are relative to another. It says itself what they become."""
        stated = re.findall(payload.group.options["stated"], payload.text)
        read = parse(payload.body, ADDRESS).pages
        return Outcome({"first": next(iter(read), None)}, {normalised(url, ADDRESS) for url in stated} - {*read, None})

    try:
        yield {"listing": listing, "based": based}
    finally:
        await web.close()
