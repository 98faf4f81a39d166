"""A service that asks on behalf of people gets what each of them may read, within its scopes, and leaves a trail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.client import AsyncClient, ProblemError
from tests.support.query.http_kit import World, service_over, write_keys
from tests.support.query.library import document
from tests.support.query.mcp_kit import Person, call, refused
from topics.messages import IdentityChanged

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

PRIVATE = Ed25519PrivateKey.generate()
PEM = PRIVATE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def vouch(person: str, **changes: Any) -> str:
    now = int(time.time())
    claims = {"iss": "bot", "aud": "penstock", "sub": person, "iat": now, "exp": now + 60} | changes
    return jwt.encode(claims, PRIVATE, "EdDSA")


@dataclass
class Bot:
    client: httpx.AsyncClient
    world: World
    tenant: str

    def headers(self, person: str, **changes: Any) -> dict[str, str]:
        return {"X-Api-Key": "bot-key", "X-Penstock-On-Behalf-Of": vouch(person, **changes)}

    async def search(self, person: str, **changes: Any) -> list[str]:
        response = await self.client.post(
            "/v1/search", json={"query": "harbour"}, headers=self.headers(person, **changes)
        )
        response.raise_for_status()
        return sorted(result["external_id"] for result in response.json()["results"])


def acting(tmp_path: Path, tenant: str, *scopes: str) -> Path:
    """A file of keys with a service that acts for people within these scopes."""
    keys = write_keys(tmp_path / "keys.toml", bot={"key": "bot-key", "tenant": tenant, "tags": ["wiki/bots"]})
    delegation = f"[bot.acts_for]\nissuer = 'bot'\npublic_key = '''{PEM}'''\nscopes = {list(scopes)}\n"
    keys.write_text(keys.read_text() + delegation)
    return keys


@pytest_asyncio.fixture(loop_scope="module")
async def bot(world: World, tenant: str, tmp_path: Path) -> AsyncIterator[Bot]:
    await world.library.put(
        document("ann.md", "The harbour of Ann.", tenant=tenant, acl_tags=["user:ann"]),
        document("bob.md", "The harbour of Bob.", tenant=tenant, acl_tags=["user:bob"]),
        document("crew.md", "The harbour of the crew.", tenant=tenant, acl_tags=["crew"]),
        document("bot.md", "The harbour of bots.", tenant=tenant, acl_tags=["bots"]),
        document("other.md", "The harbour of another tenant.", tenant=f"{tenant}-other", acl_tags=["user:ann"]),
    )
    async with service_over(world.library, auth={"keys_file": acting(tmp_path, tenant, "search")}) as (client, _):
        yield Bot(client, world, tenant)


async def test_each_person_gets_their_own_documents_and_none_of_the_services(bot: Bot) -> None:
    assert await bot.search("ann") == ["ann.md"]
    assert await bot.search("bob") == ["bob.md"]
    assert await bot.search("nobody") == []
    own = await bot.client.post("/v1/search", json={"query": "harbour"}, headers={"X-Api-Key": "bot-key"})
    assert [result["external_id"] for result in own.json()["results"]] == ["bot.md"]
    me = (await bot.client.get("/v1/me", headers=bot.headers("ann"))).json()
    assert (me["principal"], me["key"], me["kind"], me["operator"]) == ("ann", "bot", "delegated", False)


async def test_a_change_of_the_persons_groups_counts_at_the_next_request(bot: Bot) -> None:
    def groups(*names: str) -> IdentityChanged:
        at = document("x", "").observed_at
        return IdentityChanged(tenant=bot.tenant, source="wiki", principal="ann", groups=list(names), observed_at=at)

    await bot.world.paths.learn([groups("crew")])
    assert await bot.search("ann") == ["ann.md", "crew.md"]
    await bot.world.paths.learn([groups()])
    assert await bot.search("ann") == ["ann.md"]


async def test_what_is_beyond_the_scopes_or_the_tenant_is_refused(bot: Bot) -> None:
    id_ = await bot.world.id(bot.tenant, "ann.md")
    for method, path, body in (
        ("POST", "/v1/answers", {"question": "harbour?"}),
        ("GET", f"/v1/documents/{id_}", None),
        ("GET", f"/v1/documents/{id_}/why", None),
        ("POST", "/v1/feedback", {"chunk_id": str(id_), "verdict": "up"}),
        ("GET", "/v1/pipeline", None),
        ("POST", "/mcp", {}),
    ):
        response = await bot.client.request(method, path, json=body, headers=bot.headers("ann"))
        assert (response.status_code, response.json()["type"]) == (403, "urn:penstock:problem:forbidden"), path
    foreign = bot.headers("ann", tenant=f"{bot.tenant}-other")
    response = await bot.client.post("/v1/search", json={"query": "harbour"}, headers=foreign)
    assert response.status_code == 401


async def test_the_trail_names_the_person_and_the_service(bot: Bot) -> None:
    response = await bot.client.post("/v1/search", json={"query": "harbour"}, headers=bot.headers("ann"))
    rows: list[Any] = []
    async with asyncio.timeout(60):
        while not rows:
            await asyncio.sleep(0.05)
            rows = await bot.world.library.execute(
                "SELECT actor, credential, access FROM trail.records WHERE request = %s",
                response.headers["request-id"],
            )
    assert [tuple(row) for row in rows] == [("ann", "delegated", ["key:bot"])]


async def test_one_client_asks_for_many_people(bot: Bot) -> None:
    async with AsyncClient(str(bot.client.base_url), "bot-key") as client:
        ann, bob = client.on_behalf_of(lambda: vouch("ann")), client.on_behalf_of(vouch("bob"))
        for person, expected in ((ann, "ann.md"), (bob, "bob.md"), (client, "bot.md")):
            results = (await person.search("harbour")).results
            assert [result.external_id for result in results] == [expected]
        with pytest.raises(ProblemError) as refused:
            await ann.answer("harbour?")
        assert refused.value.kind == "forbidden"


async def test_conversations_need_a_scope_of_their_own(bot: Bot, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(file.read_text().replace("['search']", "['answers']"))
    question = {"question": "What did I ask?", "history": True}
    response = await bot.client.post("/v1/answers", json=question, headers=bot.headers("ann"))
    assert response.status_code == 403
    assert "conversations" in response.json()["detail"]


async def test_a_service_needs_the_scope_of_answers_for_a_persons_standing_questions_over_mcp(
    world: World, tenant: str, tmp_path: Path
) -> None:
    for scopes in (["mcp"], ["mcp", "answers"]):
        keys = acting(tmp_path, tenant, *scopes)
        async with service_over(world.library, auth={"keys_file": keys}) as (client, _):
            address = str(client.base_url).rstrip("/")
            key = {"X-Api-Key": "bot-key"}
            alone = Person(address, key)
            person = Person(address, key | {"X-Penstock-On-Behalf-Of": vouch("ann")})
            refusing = [alone] if "answers" in scopes else [alone, person]
            for caller in refusing:
                for tool, arguments in (("standing", {}), ("standing_keep", {"question": "harbour?"})):
                    assert (await refused(caller, tool, **arguments)).startswith("only a person has standing questions")
            if "answers" in scopes:
                assert (await call(person, "standing"))["standing"] == []


async def test_a_service_needs_the_scope_of_previews_to_preview_for_a_person_over_mcp(
    world: World, tenant: str, tmp_path: Path
) -> None:
    edit = {"source": "wiki", "path": "ann.md", "content": "The harbour."}
    for scopes in (["mcp"], ["mcp", "previews"]):
        keys = acting(tmp_path, tenant, *scopes)
        async with service_over(world.library, auth={"keys_file": keys}) as (client, _):
            headers = {"X-Api-Key": "bot-key", "X-Penstock-On-Behalf-Of": vouch("ann")}
            person = Person(str(client.base_url).rstrip("/"), headers)
            if "previews" in scopes:
                assert (await call(person, "preview", **edit))["questions"] == 0
            else:
                assert "needs the scope `previews`" in await refused(person, "preview", **edit)
