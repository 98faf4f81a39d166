"""All comments of a page, by v2: the roots of both kinds, and what was answered to them."""

from __future__ import annotations

from connectors.confluence import parsing
from connectors.confluence.api import Api, safe, shaped
from connectors.confluence.model import Content, Remark

MAX_LISTED = 250
MAX_COMMENTS = 2_000
"""Of one page. What comes after is left out: who discusses that long has another tool for it."""


async def of(api: Api, page: Content) -> list[Remark]:
    found: list[Remark] = []
    for where in ("footer-comments", "inline-comments"):
        waiting: list[tuple[str, str | None]] = [(f"api/v2/{page.kind}s/{safe(page.id)}/{where}", None)]
        while waiting and len(found) < MAX_COMMENTS:
            path, parent = waiting.pop(0)
            async for json in api.every(path, limit=MAX_LISTED, **{"body-format": "storage"}):
                with shaped(api.web.name):
                    remark = parsing.remark_v2(json, parent)
                found.append(remark)
                waiting.append((f"api/v2/{where}/{safe(remark.id)}/children", remark.id))
    return found
