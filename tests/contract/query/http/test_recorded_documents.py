"""Every document that a response shows is in the record of its request.

Every route and every tool is called by somebody who may use all of it. What a response shows is recognised by the ids,
names and texts of the documents, and not by what the code says that it shows.
"""

from __future__ import annotations

import asyncio
import re
from uuid import UUID

import httpx
import pytest

from pipeline.core.identity import document_id
from pipeline.ledger import trail as table
from pipeline.ledger.trail import RecordFilter
from query.http.audit_trail import REQUEST_ID, UNRECORDED
from tests.contract.query.http.test_credentials import QUESTION, Call, calls, planted
from tests.support.query.http_kit import FEEDBACK, World, as_, service_over
from tests.support.query.library import document
from tests.support.query.mcp_kit import WAY_IN

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

TEXTS = {
    ("wiki", "dam.md"): "feeds four turbines",
    ("wiki", "hall.md"): "feeds five turbines",
    ("wiki", "copied.md"): None,
    ("vault", "copy.md"): None,
}
"""Source and external id of each document, and a part of its text; None: others have the same text."""
SHOWING = {
    *("/v1/search", "/v1/answers", "/v1/previews", "/v1/documents/{id}", "/v1/documents/{id}/why", "/v1/conflicts"),
    *("/v1/standing/{id}", "/v1/standing/{id}/answer"),
    *("search", "fetch", "conflicts", "preview", "standing_keep", "standing_show", "standing_ask"),
}
"""The routes and tools whose responses show a document here."""


def further(ids: dict[str, str]) -> list[Call]:
    """Further requests of the same routes, which show documents in other ways."""
    edit = {"path": "dam.md", "external_id": "dam.md", "content": "The dam feeds seven turbines."}
    return [
        Call("POST", "/v1/answers", {"question": QUESTION, "stream": True}),
        Call("POST", "/v1/answers", {"question": QUESTION, "documents": [ids["document"]]}),
        Call("POST", "/v1/search", {"query": "turbines", "mode": "vector"}),
        Call("POST", "/v1/search", {"query": "dam", "mode": "keyword", "sort": "newest", "top": 1}),
        Call("POST", "/v1/previews", {"source": "wiki", "documents": [edit]}),
        Call("GET", f"/v1/conflicts?document={ids['document']}"),
    ]


def shown(response: httpx.Response) -> set[tuple[str, str]]:
    """The documents of which a response has the id, the external id or a part of the text."""
    tenant, contents = response.request.headers["x-penstock-tenant"], response.text
    return {
        name
        for name, text in TEXTS.items()
        if str(document_id(tenant, *name)) in contents or name[1] in contents or (text is not None and text in contents)
    }


async def documents_in_record(world: World, request: str) -> set[UUID]:
    """Those of a request's records, as soon as there is one."""
    async with asyncio.timeout(60):
        while True:
            async with world.library.pool.connection() as connection:
                page = await table.page(connection, RecordFilter(), 10_000)
            if records := [sealed.record for sealed in page if sealed.record.request == request]:
                return {id_ for record in records for id_ in record.documents}
            await asyncio.sleep(0.05)


def named(call: Call) -> str:
    if call.tool:
        return str(call.body["params"]["name"])
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "{id}", call.path.partition("?")[0])


async def test_every_document_that_a_response_shows_is_in_the_record_of_its_request(world: World, tenant: str) -> None:
    ann = as_("ann", tenant)
    async with service_over(world.library, feedback=FEEDBACK) as (client, _):
        ids = await planted(world, tenant, client, ann)
        copies = [
            document(name, "The dam feeds six turbines.", tenant=tenant, source=source, acl_tags=["user:ann"])
            for source, name in [*TEXTS][2:]
        ]
        await world.library.put(*copies)
        showing, wrong = set(), []
        for call in [*further(ids), *calls(ids)]:
            if call.needs == "any operator":
                continue  # tests/contract/pipeline/test_trail.py
            headers = {**ann, **(WAY_IN if call.tool else {})}
            response = await client.request(call.method, call.path, json=call.body, headers=headers)
            assert response.status_code == call.ok, response.text
            recorded: set[UUID] = set()
            if call.path not in UNRECORDED:
                recorded = await documents_in_record(world, response.headers[REQUEST_ID])
            shows = shown(response)
            if missing := {name for name in shows if document_id(tenant, *name) not in recorded}:
                wrong.append((named(call), call.body, missing))
            showing |= {named(call)} if shows else set()
        assert wrong == []
        assert showing == SHOWING
        both = [{"jsonrpc": "2.0", "id": n, "method": "tools/list"} for n in (1, 2)]
        assert (await client.post("/mcp", json=both, headers={**ann, **WAY_IN})).status_code == 400, (
            "a request has one record, and so one call"
        )
