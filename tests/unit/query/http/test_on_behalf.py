"""Services that ask on behalf of people: the entries of the file, and who is believed about whom."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from starlette.datastructures import Headers

from pipeline.core.errors import Misconfigured
from query.auth.api_keys import KeyFile, parse
from query.auth.authenticator import Authenticator, open_authenticator
from query.auth.identity import ALWAYS, PATHS, Identity
from query.http.app import describe_app
from query.problems import Problem
from query.settings import AuthSettings, ServeSettings
from tests.fakes.issuer import Issuer, Key, issuing

PRIVATE = Ed25519PrivateKey.generate()
PEM = PRIVATE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
ENDS = (datetime.now(UTC) + timedelta(days=1)).date()
KEY = f'sha256 = "{sha256(b"bot-key").hexdigest()}"\nexpires = {ENDS}\ntenant = "acme"\n'


def entry(**changes: str | None) -> str:
    fields = {
        "issuer": '"https://bot.example"',
        "public_key": f"'''{PEM}'''",
        "scopes": '["search"]',
        "principals": '["*@acme.example"]',
    } | changes
    return f"[bot]\n{KEY}[bot.acts_for]\n" + "\n".join(f"{k} = {v}" for k, v in fields.items() if v is not None) + "\n"


def authenticator(tmp_path: Path, text: str) -> Authenticator:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return Authenticator(AuthSettings(), keys=None, key_file=KeyFile(path), development=None)


def claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    all_claims = {
        "iss": "https://bot.example",
        "aud": "penstock",
        "sub": "ann@acme.example",
        "iat": now,
        "exp": now + 60,
    }
    return {name: value for name, value in (all_claims | changes).items() if value is not None}


def signed(key: Any = PRIVATE, algorithm: str = "EdDSA", **changes: Any) -> str:
    return jwt.encode(claims(**changes), key, algorithm)


def headers(assertion: str | None, key: str = "bot-key") -> Headers:
    return Headers({"X-Api-Key": key} | ({} if assertion is None else {"X-Penstock-On-Behalf-Of": assertion}))


async def test_a_service_asks_on_behalf_of_the_person_whom_its_issuer_names(tmp_path: Path) -> None:
    identity = await authenticator(tmp_path, entry()).authenticate(headers(signed()))
    assert identity == Identity("delegated", "acme", "ann@acme.example", key="bot", scopes=("search",))
    assert [identity.may_use(path) for path in ("/v1/search", "/v1/facets", "/v1/me")] == [True] * 3
    beyond = ("/v1/answers", "/v1/search-all", "/v1/documents/1", "/v1/review", "/v1/pipeline", "/mcp", "/v1/feedback")
    assert not any(identity.may_use(path) for path in beyond)


OPERATORS_ONLY = {"/v1/review", "/v1/pipeline"}
"""No service may do on behalf of a person what takes an operator."""


def test_every_path_belongs_to_a_scope_or_to_operators_alone() -> None:
    scoped = {path for paths in PATHS.values() for path in paths}
    served = {"/".join(path.split("/")[:3]) for path in describe_app().openapi()["paths"] if path.startswith("/v1/")}
    assert served == (scoped - {"/mcp"}) | ALWAYS | OPERATORS_ONLY


NOW = int(time.time())
BAD = {
    "none": lambda: None,
    "empty": lambda: "",
    "no token": lambda: "ann@acme.example",
    "another's key": lambda: signed(Ed25519PrivateKey.generate()),
    "no signature": lambda: jwt.encode(claims(), None, "none"),
    "the public key as secret": lambda: Issuer(
        url="https://bot.example", keys=[Key("k", "HS256", PRIVATE)]
    ).with_the_public_key_as_secret(aud="penstock", sub="ann@acme.example"),
    "another issuer": lambda: signed(iss="https://other.example"),
    "another audience": lambda: signed(aud="another"),
    "expired": lambda: signed(iat=NOW - 600, exp=NOW - 60),
    "valid for too long": lambda: signed(exp=NOW + 3_600),
    "without an end": lambda: signed(exp=None),
    "without a person": lambda: signed(sub=None),
    "another's person": lambda: signed(sub="ann@globex.example"),
    "a pattern": lambda: signed(sub="*"),
    "another tenant": lambda: signed(tenant="globex"),
    "a tenant that is no name": lambda: signed(tenant=7),
}


@pytest.mark.parametrize("kind", BAD)
async def test_nobody_is_believed_without_a_valid_token(tmp_path: Path, kind: str) -> None:
    with pytest.raises(Problem) as refused:
        await authenticator(tmp_path, entry()).authenticate(headers(BAD[kind]()))
    assert refused.value.kind == "unauthorized"
    assert "ann" not in refused.value.detail


async def test_a_token_of_a_person_is_nothing_without_the_key_of_the_service(tmp_path: Path) -> None:
    one = authenticator(tmp_path, entry())
    for bad in (headers(signed(), key="other"), Headers({"X-Penstock-On-Behalf-Of": signed()})):
        with pytest.raises(Problem):
            await one.authenticate(bad)
    twice = Headers(raw=[(b"x-api-key", b"bot-key"), *[(b"x-penstock-on-behalf-of", signed().encode())] * 2])
    with pytest.raises(Problem, match="once"):
        await one.authenticate(twice)


async def test_a_key_that_acts_for_nobody_cannot_name_a_person(tmp_path: Path) -> None:
    one = authenticator(tmp_path, f'[bot]\n{KEY}tags = ["x"]\n')
    assert (await one.authenticate(headers(None))).tags == ("x",)
    with pytest.raises(Problem, match="may not ask on behalf"):
        await one.authenticate(headers(signed()))


async def test_a_service_may_serve_several_tenants_and_its_own_access_stays_apart(tmp_path: Path) -> None:
    text = entry(tenants='["globex"]').replace('tenant = "acme"\n', 'tenant = "acme"\ntags = ["wiki/bots"]\n')
    one = authenticator(tmp_path, text)
    assert (await one.authenticate(headers(signed(tenant="globex")))).tenant == "globex"
    own = await one.authenticate(headers(None))
    assert (own.kind, own.tags, own.principal, own.scopes) == ("key", ("wiki/bots",), None, None)
    person = await one.authenticate(headers(signed()))
    assert (person.tags, person.operator) == ((), False)


async def test_a_service_loses_its_people_when_its_entry_is_removed(tmp_path: Path) -> None:
    one = authenticator(tmp_path, entry())
    await one.authenticate(headers(signed()))
    (tmp_path / "keys.toml").write_text("")
    with pytest.raises(Problem):
        await one.authenticate(headers(signed()))


async def test_the_keys_of_a_services_issuer_may_be_published(tmp_path: Path) -> None:
    async with issuing() as issuer:
        text = entry(issuer=f'"{issuer.url}"', public_key=None, jwks_url=f'"{issuer.jwks_url}"')
        (tmp_path / "keys.toml").write_text(text)
        settings = AuthSettings(keys_file=tmp_path / "keys.toml")
        async with open_authenticator(settings, ServeSettings()) as one:
            token = issuer.token(aud="penstock", sub="ann@acme.example")
            assert (await one.authenticate(headers(token))).principal == "ann@acme.example"
            forged = issuer.token(key=Key.rsa("k1"), aud="penstock", sub="ann@acme.example")
            with pytest.raises(Problem):
                await one.authenticate(headers(forged))


ACTOR = '[desk]\nactor = "desk-client"\ntenant = "acme"\n[desk.acts_for]\nscopes = ["search"]\nprincipals = ["ann"]\n'


async def test_an_exchanged_token_gives_the_scopes_of_its_actor(tmp_path: Path) -> None:
    async with issuing() as issuer:
        (tmp_path / "keys.toml").write_text(ACTOR)
        settings = AuthSettings(**issuer.settings(keys_file=tmp_path / "keys.toml"))
        async with open_authenticator(settings, ServeSettings()) as one:

            async def identity(**changes: Any) -> Identity:
                return await one.authenticate(Headers({"Authorization": f"Bearer {issuer.token(**changes)}"}))

            assert (await identity()).scopes is None
            desk = await identity(act={"sub": "desk-client", "act": {"sub": "earlier"}}, roles=["penstock-operator"])
            assert desk == Identity("delegated", "acme", "ann", key="desk", scopes=("search",))
            for act in ({"sub": "other"}, {"sub": ""}, {}, "desk-client", None, 7):
                with pytest.raises(Problem):
                    await one.authenticate(Headers({"Authorization": f"Bearer {_with(issuer, act)}"}))
            with pytest.raises(Problem):
                await identity(act={"sub": "desk-client"}, email="bob")
            with pytest.raises(Problem):
                await identity(act={"sub": "desk-client"}, tenant="globex")


def _with(issuer: Issuer, act: Any) -> str:
    """A token with this claim, also where it is null."""
    key = issuer.keys[-1]
    return jwt.encode(issuer.claims() | {"act": act}, key.private, key.algorithm, headers={"kid": key.kid})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (entry(public_key=None), "bot.acts_for: .*public_key and jwks_url"),
        (entry(jwks_url='"https://x.example"'), "bot.acts_for: .*public_key and jwks_url"),
        (entry(public_key=None, jwks_url='"http://x.example"'), "must begin with https"),
        (entry(public_key='"ssh-ed25519 AAAA"'), "not a public key in PEM"),
        (entry(issuer=None), "bot.acts_for"),
        (entry(scopes='["everything"]'), "bot.acts_for.scopes"),
        (entry(algorithms='["HS256"]'), "bot.acts_for.algorithms"),
        (f"[bot]\n{KEY}[bot.acts_for]\n", "set issuer and one of"),
        ('[d]\nactor = "x"\ntenant = "acme"\n', "set acts_for"),
        (ACTOR.replace("scopes", 'issuer = "x"\njwks_url = "https://x.example"\nscopes'), "an actor has"),
        (f'[d]\nactor = "x"\n{KEY}[d.acts_for]\n', "either sha256 or actor"),
        (ACTOR + ACTOR.replace("[desk", "[other"), "two entries have the same actor"),
    ],
)
def test_an_entry_that_cannot_be_checked_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_a_broken_entry_is_named_without_its_key(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(entry(public_key='"secret-material"'))
    with pytest.raises(Misconfigured) as refused:
        KeyFile(tmp_path / "keys.toml")
    assert "secret-material" not in str(refused.value)
