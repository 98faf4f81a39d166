"""Every route and every tool with every kind of credential: who may do what, on a real service.

A route or a tool that is new fails the first test until it has its row here.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from query.auth.identity import PATHS, Scope
from query.http.app import describe_app
from query.mcp.server import TOOLS
from tests.fakes.issuer import Issuer, issuing
from tests.fakes.issuer import bearer as token_header
from tests.support.query.http_kit import World, service_over, write_keys
from tests.support.query.library import document
from tests.support.query.mcp_kit import WAY_IN

pytestmark = [pytest.mark.stack]

QUESTION = "how many turbines does the reservoir of the dam feed"
PRIVATE = Ed25519PrivateKey.generate()
PEM = PRIVATE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@dataclass(frozen=True)
class Call:
    """A request, and who may make it with success. The objects that it names are Ann's."""

    method: str
    path: str
    body: Any = None
    scopes: frozenset[Scope] | None = frozenset()
    """The scopes that a service needs to make it on behalf of Ann. None: it needs none. Empty: it never may."""
    needs: str = ""
    """principal: the caller must be a person; reader: one who may read Ann's documents; ann: Ann herself; operator: an
    operator of the tenant, or of any (``any operator``)."""
    ok: int = 200
    tool: bool = False


def tool(name: str, needs: str = "", *also: Scope, **arguments: Any) -> Call:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
    return Call("POST", "/mcp", body, frozenset({"mcp", *also}), needs, tool=True)


def calls(ids: dict[str, str]) -> list[Call]:
    """One for each route and tool, in an order in which none removes what a later one needs."""
    doc, standing, chunk, conflict = ids["document"], ids["standing"], ids["chunk"], ids["conflict"]
    rating = {"chunk_id": chunk, "query": "reservoir", "verdict": "up"}
    search, answers, documents = (frozenset[Scope]({scope}) for scope in ("search", "answers", "documents"))
    return [
        Call("POST", "/v1/search", {"query": "reservoir"}, search),
        Call("GET", "/v1/facets", None, search),
        Call("GET", "/v1/me", None, None),
        Call("POST", "/v1/answers", {"question": QUESTION}, answers),
        Call("POST", "/v1/answers", {"question": QUESTION, "history": True}, answers | {"history"}),
        Call("POST", "/v1/answers", {"question": QUESTION, "keep": True}, answers, "principal"),
        Call("GET", f"/v1/documents/{doc}", None, documents, "reader"),
        Call("GET", f"/v1/documents/{doc}/why", None, documents, "reader or operator"),
        Call("GET", "/v1/conflicts", None, documents),
        Call("POST", f"/v1/conflicts/{conflict}", {"decision": "open"}, documents, "reader", 204),
        Call("POST", "/v1/feedback", rating, frozenset({"feedback"}), ok=204),
        Call("POST", "/v1/previews", {"source": "wiki", "documents": []}, frozenset({"previews"})),
        Call("GET", "/v1/review", None, frozenset(), "any operator"),
        Call("POST", f"/v1/review/{uuid4()}", {"verdict": "right"}, frozenset(), "any operator", 404),
        Call("GET", "/v1/pipeline", None, frozenset(), "any operator"),
        Call("GET", "/v1/standing", None, answers, "principal"),
        Call("GET", f"/v1/standing/{standing}", None, answers, "ann"),
        Call("POST", f"/v1/standing/{standing}/answer", None, answers, "ann"),
        tool("search", query="reservoir"),
        tool("fetch", "reader", id=doc),
        tool("conflicts"),
        tool("preview", "reader", "previews", id=doc, content="The reservoir of the dam."),
        tool("standing", "principal", "answers"),
        tool("standing_keep", "principal", "answers", question=QUESTION),
        tool("standing_show", "ann", "answers", id=standing),
        tool("standing_ask", "ann", "answers", id=standing),
        tool("standing_remove", "ann", "answers", id=ids["second standing"]),
        Call("DELETE", f"/v1/standing/{standing}", None, answers, "ann", 204),
    ]


def test_every_route_and_tool_has_its_row() -> None:
    rows = calls(dict.fromkeys(("document", "standing", "chunk", "conflict", "second standing"), "{id}"))
    described = {
        (method.upper(), "/".join("{id}" if part.startswith("{") else part for part in path.split("/")))
        for path, operations in describe_app().openapi()["paths"].items()
        for method in operations
        if path.startswith("/v1/")
    }
    review = {(row.method, row.path if not row.path.startswith("/v1/review/") else "/v1/review/{id}") for row in rows}
    assert described == {row for row in review if row[1] != "/mcp"}
    assert {entry.name for entry in TOOLS} == {row.body["params"]["name"] for row in rows if row.tool}


@dataclass(frozen=True)
class Credential:
    headers: dict[str, str]
    kind: str
    """nobody, person, operator, service, or delegated."""
    is_ann: bool = False
    reads: bool = False
    """True if it may read Ann's documents."""
    scopes: frozenset[Scope] | None = None
    """The scopes of a service that acts for Ann."""


def vouch(**changes: Any) -> str:
    now = int(time.time())
    claims = {"iss": "bot", "aud": "penstock", "sub": "ann", "iat": now, "exp": now + 300} | changes
    return jwt.encode(claims, PRIVATE, "EdDSA")


@asynccontextmanager
async def credentials(tenant: str, keys: Path) -> AsyncIterator[tuple[Issuer, dict[str, Credential]]]:
    """All kinds, by name, and their issuer. The file of keys is written."""
    scopes: list[Scope] = [*PATHS, "history"]
    everything = frozenset(scopes)
    grants = {scope: frozenset({scope}) for scope in scopes} | {
        "mcp and answers": frozenset[Scope]({"mcp", "answers"}),
        "mcp and previews": frozenset[Scope]({"mcp", "previews"}),
        "answers and history": frozenset[Scope]({"answers", "history"}),
        "all scopes": everything,
    }
    write_keys(
        keys,
        crew={"key": "crew-key", "tenant": tenant, "tags": ["crew"]},
        reader={"key": "reader-key", "tenant": tenant, "tags": ["wiki/user:ann"]},
        ended={"key": "ended-key", "tenant": tenant, "tags": ["wiki/user:ann"], "expires": date(2026, 1, 1)},
        admin={"key": "admin-key", "tenant": tenant, "operator": True},
        **{name: {"key": f"{name}-key", "tenant": tenant} for name in grants},
    )
    text = keys.read_text()
    for name, granted in grants.items():
        quoted = f'"{name}"'
        entry = f"[{quoted}.acts_for]\nissuer = 'bot'\npublic_key = '''{PEM}'''\nscopes = {sorted(granted)}\n"
        text += entry
    keys.write_text(text)
    async with issuing() as issuer:

        def token(**claims: Any) -> dict[str, str]:
            return token_header(issuer.token(**{"tenant": tenant} | claims))

        operator, other = {"roles": ["penstock-operator"]}, {"tenant": f"{tenant}-other"}
        on_behalf = {
            f"{name} for ann": Credential(
                {"X-Api-Key": f"{name}-key", "X-Penstock-On-Behalf-Of": vouch(roles=["penstock-operator"])},
                "delegated",
                is_ann=True,
                reads=True,
                scopes=granted,
            )
            for name, granted in grants.items()
        }
        refused = {
            "none": {},
            "an unknown key": {"X-Api-Key": "guess"},
            "an expired key": {"X-Api-Key": "ended-key"},
            "no signature": token_header(issuer.unsigned(tenant=tenant)),
            "the public key as secret": token_header(issuer.with_the_public_key_as_secret(tenant=tenant)),
            "a person's token for a service": {"X-Penstock-On-Behalf-Of": vouch()},
            "such a token as bearer": token_header(vouch(tenant=tenant, email="ann", email_verified=True)),
            "a service's key without a person": {"X-Api-Key": "all scopes-key"},
            "a service for another tenant": {
                "X-Api-Key": "all scopes-key",
                "X-Penstock-On-Behalf-Of": vouch(tenant=f"{tenant}-other"),
            },
            "a key that acts for nobody": {"X-Api-Key": "crew-key", "X-Penstock-On-Behalf-Of": vouch()},
            "headers of development mode": {"X-Penstock-As": "ann", "X-Penstock-Tenant": tenant},
        }
        yield (
            issuer,
            {
                **{name: Credential(headers, "nobody") for name, headers in refused.items()},
                "bob": Credential(token(email="bob", groups=["user:ann"]), "person"),
                "ann elsewhere": Credential(token(email="ann", **other), "person"),
                "an operator elsewhere": Credential(token(email="ann", **other, **operator), "operator elsewhere"),
                "an operator": Credential(token(email="eve", **operator), "operator"),
                "an operator's key": Credential({"X-Api-Key": "admin-key"}, "operator's key"),
                "a key": Credential({"X-Api-Key": "crew-key"}, "service"),
                "a key of ann's tag": Credential({"X-Api-Key": "reader-key"}, "service", reads=True),
                **on_behalf,
                "ann": Credential(token(email="ann"), "person", is_ann=True, reads=True),
            },
        )


def expected(call: Call, by: Credential) -> int:
    """The status of the response; of a tool, 200 or its refusal as 400."""
    if by.kind == "nobody":
        return 401
    if by.scopes is not None and call.scopes is not None:
        if call.tool and "mcp" in by.scopes:
            return call.ok if call.scopes <= by.scopes else 400
        if not call.scopes or not call.scopes <= by.scopes:
            return 403
    is_operator, is_person = by.kind.startswith("operator"), by.kind in ("person", "operator", "delegated")
    is_person |= by.kind == "operator elsewhere"
    may = {
        "": True,
        "principal": is_person,
        "reader": by.reads,
        "reader or operator": by.reads or by.kind in ("operator", "operator's key"),
        "ann": by.is_ann,
        "any operator": is_operator,
    }[call.needs]
    if may:
        return call.ok
    if call.tool:
        return 400
    if call.needs == "any operator" or (call.needs in ("principal", "ann") and not is_person):
        return 403
    return 404


async def received(client: httpx.AsyncClient, call: Call, by: Credential) -> int:
    headers = {**WAY_IN, **by.headers} if call.tool else by.headers
    response = await client.request(call.method, call.path, json=call.body, headers=headers)
    if call.tool and response.status_code == 200:
        return 400 if response.json()["result"].get("isError") else 200
    return response.status_code


async def planted(world: World, tenant: str, client: httpx.AsyncClient, ann: dict[str, str]) -> dict[str, str]:
    """Ann's document, passage, conflict and two standing questions."""
    texts = {"dam.md": "The reservoir of the dam feeds four turbines.", "hall.md": "The dam feeds five turbines."}
    await world.library.put(
        *(document(name, text, tenant=tenant, acl_tags=["user:ann"]) for name, text in texts.items())
    )
    a, b = [await world.id(tenant, name) for name in texts]
    [(chunk, conflict)] = await world.library.execute(
        "INSERT INTO conflicts (id, tenant, generation, kind, document_a, document_b, chunk_a, chunk_b, places)"
        " SELECT gen_random_uuid(), %s, m.generation, 'number', m.document_id, n.document_id, m.chunk_ids[1],"
        " n.chunk_ids[1], '[]' FROM manifests m JOIN manifests n USING (generation)"
        " WHERE m.document_id = %s AND n.document_id = %s RETURNING chunk_a, id",
        tenant,
        a,
        b,
    )
    standing = []
    for _ in range(2):
        answer = await client.post("/v1/answers", json={"question": QUESTION, "keep": True}, headers=ann)
        standing.append(answer.json()["standing_id"])
    ids: dict[str, UUID | str] = {"document": a, "chunk": chunk, "conflict": conflict}
    return {name: str(id_) for name, id_ in ids.items()} | dict(
        zip(("standing", "second standing"), standing, strict=True)
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_each_route_and_tool_does_for_each_credential_what_it_may_and_nothing_else(
    world: World, tenant: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    async with credentials(tenant, keys) as (issuer, everybody):
        auth = issuer.settings(keys_file=keys)
        async with service_over(world.library, auth=auth) as (client, _):
            ann = everybody["ann"].headers
            ids = await planted(world, tenant, client, ann)
            wrong = []
            for name, by in everybody.items():
                for call in calls(ids):
                    if by.is_ann and call.needs == "ann" and (call.ok == 204 or "standing_remove" in str(call.body)):
                        continue  # it would remove what the next ones need: see below
                    status, should = await received(client, call, by), expected(call, by)
                    if status != should:
                        wrong.append(f"{name}: {call.method} {call.path} {call.body}: {status}, not {should}")
            assert wrong == []
            for call in calls(ids):
                if call.needs == "ann" and (call.ok == 204 or "standing_remove" in str(call.body)):
                    assert await received(client, call, everybody["ann"]) == call.ok
