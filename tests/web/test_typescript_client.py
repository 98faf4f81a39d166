"""The TypeScript client in a page of another origin, which the service allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from pipeline.runtime.http_server import served
from query.settings import ChatSettings
from tests.support.query.http_kit import service_over, write_keys
from tests.support.query.library import document
from tests.support.query.typescript import build
from tests.web.conftest import Site

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

PAGE = """<!doctype html><title>Another page</title>
<script type="importmap">{"imports": {
  "penstock-client": "/package/dist/client.js",
  "openapi-fetch": "/package/node_modules/openapi-fetch/dist/index.mjs",
  "eventsource-parser/stream": "/package/node_modules/eventsource-parser/dist/stream.js"
}}</script>
<script type="module">import { Client } from "penstock-client"; window.Client = Client;</script>
"""
ASK = """async ([url, token]) => {
  const client = new Client({ url, token });
  const { results } = await client.search({ query: "herons paint wheels", top: 1 });
  const names = [];
  for await (const { event } of client.streamAnswer({ question: "What do herons paint?" })) names.push(event);
  const error = await client.document("00000000-0000-0000-0000-000000000000").catch((problem) => problem);
  const { kind, requestId } = error;
  return { id: results[0].external_id, first: names[0], last: names.at(-1), kind, requestId };
}"""


async def test_a_page_of_an_allowed_origin_searches_and_asks(site: Site, browser: Browser, tmp_path: Path) -> None:
    package = build(tmp_path)
    herons = document("heron.md", "Herons paint wheels.", tenant="acme", acl_tags=["user:page"])
    await site.library.put(herons)
    keys = write_keys(tmp_path / "keys.toml", page={"key": "k-1", "tenant": "acme", "tags": ["user:page"]})
    files = Mount("/package", StaticFiles(directory=package, follow_symlink=True))
    chat = ChatSettings(base_url=site.chat.url, model=site.chat.model, api_key="k")
    async with (
        served(Starlette(routes=[Route("/", lambda _: HTMLResponse(PAGE)), files])) as origin,
        service_over(site.library, auth={"keys_file": keys}, serve={"allowed_origins": (origin,)}, chat=chat) as (
            client,
            _,
        ),
    ):
        page = await browser.new_page()
        try:
            await page.goto(origin)
            await page.wait_for_function("() => window.Client !== undefined")
            report = await page.evaluate(ASK, [str(client.base_url).rstrip("/"), "k-1"])
        finally:
            await page.close()
    assert (report["id"], report["first"], report["last"]) == ("heron.md", "sources", "done")
    assert report["kind"] == "not-found"
    assert report["requestId"], "as the audit trail names it"
