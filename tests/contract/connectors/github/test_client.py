"""Tokens of a GitHub App, addresses, and the fake's answers compared with GitHub's OpenAPI description."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import jsonschema
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from connectors.github import GitHubOptions
from connectors.web.token import TOKEN_MARGIN_SECONDS
from pipeline.core.errors import Misconfigured
from tests.support.connectors.github_kit import Desk, desk_in
from tests.support.connectors.reading import listing

OPENAPI = json.loads((Path(__file__).parents[3] / "data" / "github-openapi.json").read_text())


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        desk.fake.add(desk.fake.repository("acme/handbook", "ines"), "Issue", "One", "Text.")
        yield desk


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def pem(key: rsa.RSAPrivateKey) -> str:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(encoding, form, serialization.NoEncryption()).decode()


async def test_an_app_requests_one_token_an_hour_and_renews_it_before_it_expires(
    desk: Desk, key: rsa.RSAPrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.fake.app_key = key.public_key()
    file = desk.folder / "key.pem"
    file.write_text(pem(key))
    source = desk.github(app_id=7, installation_id=42, private_key=str(file))
    assert len(await listing(source)) == len(await listing(source)) == 1
    assert len(desk.fake.installation_tokens) == 1
    at = time.monotonic() + 3600 - TOKEN_MARGIN_SECONDS
    monkeypatch.setattr("connectors.web.token.time", SimpleNamespace(monotonic=lambda: at))
    await listing(source)
    assert len(desk.fake.installation_tokens) == 2


async def test_an_app_renews_a_token_that_is_refused(desk: Desk, key: rsa.RSAPrivateKey) -> None:
    desk.fake.app_key = key.public_key()
    source = desk.github(app_id=7, installation_id=42, private_key=pem(key))
    await listing(source)
    desk.fake.installation_tokens[:] = []
    assert len(await listing(source)) == 1


async def test_an_app_without_a_valid_key_or_installation_is_named_and_its_key_is_not(
    desk: Desk, key: rsa.RSAPrivateKey
) -> None:
    for app, installation, message in ((8, 42, "the App 8 gets no token"), (7, 41, "no installation 41")):
        desk.fake.app_key = key.public_key()
        source = desk.github(app_id=app, installation_id=installation, private_key=pem(key))
        with pytest.raises(Misconfigured, match=message):
            await listing(source)
    for text in ("-----BEGIN RSA PRIVATE KEY-----\nsecret", "/does/not/exist/secret"):
        with pytest.raises(Misconfigured) as raised:
            desk.github(app_id=7, installation_id=42, private_key=text)
        assert "secret" not in str(raised.value)


def test_the_address_of_graphql_follows_from_that_of_rest() -> None:
    for rest, graphql in (
        ("https://api.github.com", "https://api.github.com/graphql"),
        ("https://github.acme.example/api/v3/", "https://github.acme.example/api/graphql"),
    ):
        assert GitHubOptions(token="t", organization="acme", api_url=rest).graphql_url == graphql  # type: ignore[arg-type]


async def test_the_fakes_answers_match_the_published_description(desk: Desk, key: rsa.RSAPrivateKey) -> None:
    """GraphQL is executed on the published schema; this is the rest."""
    desk.fake.app_key = key.public_key()
    await listing(desk.github(app_id=7, installation_id=42, private_key=pem(key)))
    place = next(iter(desk.fake.places.values()))
    async with httpx.AsyncClient(base_url=desk.url, headers={"Authorization": f"Bearer {desk.fake.token}"}) as client:
        repository = (await client.get(f"/repositories/{place.id}")).json()
        collaborators = (await client.get("/repos/acme/handbook/collaborators")).json()
    schemas = OPENAPI["schemas"]
    jsonschema.validate(repository, schemas["full-repository"])
    assert collaborators
    for collaborator in collaborators:
        jsonschema.validate(collaborator, schemas["collaborator"])
    events = desk.fake.sent()
    assert events
    for event in events:
        jsonschema.validate(json.loads(event.body), schemas["webhook-issues-opened"])


async def test_the_fakes_installation_tokens_match_the_published_description(
    desk: Desk, key: rsa.RSAPrivateKey
) -> None:
    desk.fake.app_key = key.public_key()
    now = int(time.time())
    claim = jwt.encode({"iss": "7", "iat": now, "exp": now + 60}, key, algorithm="RS256")
    async with httpx.AsyncClient(base_url=desk.url, headers={"Authorization": f"Bearer {claim}"}) as client:
        answer = await client.post("/app/installations/42/access_tokens")
    assert answer.status_code == 201
    jsonschema.validate(answer.json(), OPENAPI["schemas"]["installation-token"])
