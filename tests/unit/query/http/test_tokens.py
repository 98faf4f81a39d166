"""Tokens against a real issuer over HTTP: what is believed, and how often the issuer is asked."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from connectors.git.playground import certificate
from pipeline.core.errors import Misconfigured, Retryable
from query.auth import jwks, tokens
from query.auth.identity import Identity
from query.auth.jwks import KeySet, usable
from query.auth.tokens import Untrusted, require
from query.settings import AuthSettings
from tests.fakes.issuer import AUDIENCE, Issuer, Key, issuing
from tests.support.hostile_server import sending

KEEP = 86_400.0


@dataclass
class Clock:
    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest_asyncio.fixture
async def issuer() -> AsyncIterator[Issuer]:
    async with issuing() as issuer:
        yield issuer


@asynccontextmanager
async def open_key_set(issuer: Issuer, clock: Clock | None = None) -> AsyncIterator[KeySet]:
    async with httpx.AsyncClient() as client:
        keys = KeySet(issuer.jwks_url, keep_seconds=KEEP, client=client, clock=clock or Clock())
        yield keys
        await keys.aclose()


async def test_a_valid_token_identifies_its_caller(issuer: Issuer) -> None:
    settings = AuthSettings(**issuer.settings())
    async with open_key_set(issuer) as keys:
        assert await tokens.identify(issuer.token(), keys, settings) == (Identity("token", "acme", "ann"), None)
        roles = ["penstock-operator", "penstock-extended", 7]
        identity, _ = await tokens.identify(issuer.token(roles=roles), keys, settings)
        assert identity == Identity("token", "acme", "ann", caller_class="extended", operator=True)
        # One service for one tenant: whatever the token says.
        pinned = AuthSettings(**issuer.settings(tenant="globex", principal_claim="sub"))
        identity, _ = await tokens.identify(issuer.token(tenant=None), keys, pinned)
        assert identity == Identity("token", "globex", "0001")
    assert issuer.fetches == 1


BAD: dict[str, Callable[[Issuer], str]] = {
    "forged": lambda issuer: issuer.token(key=Key.rsa("k1")),
    "expired": lambda issuer: issuer.token(exp=int(time.time()) - 60),
    "not valid yet": lambda issuer: issuer.token(nbf=int(time.time()) + 120),
    "issued in the future": lambda issuer: issuer.token(iat=int(time.time()) + 120),
    "alg=none": Issuer.unsigned,
    "alg=none without its dot": lambda issuer: issuer.unsigned().rstrip("."),
    "alg=None in other letters": lambda issuer: _with_header(issuer.token(), "eyJhbGciOiJOb05lIn0"),
    "HS256 over the public key": Issuer.with_the_public_key_as_secret,
    "an algorithm that is not pinned": lambda issuer: issuer.token(key=Key("k1", "RS384", issuer.keys[0].private)),
    "for another audience": lambda issuer: issuer.token(aud="another-service"),
    "for no audience": lambda issuer: issuer.token(aud=None),
    "of another issuer": lambda issuer: issuer.token(iss="https://other.example"),
    "of no issuer": lambda issuer: issuer.token(iss=None),
    "without an end": lambda issuer: issuer.token(exp=None),
    "without a principal": lambda issuer: issuer.token(email=None),
    "with a principal that is no text": lambda issuer: issuer.token(email=["ann", "bob"]),
    "with an empty principal": lambda issuer: issuer.token(email=" "),
    "with an address that is not verified": lambda issuer: issuer.token(email_verified=False),
    "with an address of which nobody says that it is verified": lambda issuer: issuer.token(email_verified=None),
    "without a subject": lambda issuer: issuer.token(sub=None),
    "without the time of its issue": lambda issuer: issuer.token(iat=None),
    "valid for thirty years": lambda issuer: issuer.token(exp=int(time.time()) + 30 * 365 * 86_400),
    "with an end that is a text": lambda issuer: issuer.token(exp=str(int(time.time()) + 60)),
    "with a time of issue that is a text": lambda issuer: issuer.token(iat=str(int(time.time()) - 60)),
    "a logout token": lambda issuer: issuer.token(typ="logout+jwt"),
    "a logout token of the older kind": lambda issuer: issuer.token(
        events={"http://schemas.openid.net/event/backchannel-logout": {}}
    ),
    "with an infinite end": lambda issuer: issuer.token(exp=float("inf")),
    "with a principal that holds U+0000": lambda issuer: issuer.token(email="ann\0"),
    "of a tenant that is no Unicode text": lambda issuer: issuer.token(tenant="\ud800"),
    "with a header that nests without end": lambda issuer: _with_header(issuer.token(), "W1tb" * 3_000),
    "without a tenant": lambda issuer: issuer.token(tenant=None),
    "of a key that the issuer has not": lambda issuer: issuer.token(kid="k2"),
    "not a token": lambda issuer: "a.b.c",
    "a header that is no object": lambda issuer: _with_header(issuer.token(), "W10"),
    "endless": lambda issuer: issuer.token(padding="x" * 20_000),
}


def _with_header(token: str, header: str) -> str:
    return ".".join([header, *token.split(".")[1:]])


@pytest.mark.parametrize("kind", BAD)
async def test_invalid_tokens_are_rejected(issuer: Issuer, kind: str) -> None:
    async with open_key_set(issuer) as keys:
        with pytest.raises(Untrusted) as refused:
            await tokens.identify(BAD[kind](issuer), keys, AuthSettings(**issuer.settings()))
    assert "ann" not in str(refused.value)
    assert issuer.fetches <= 1


async def test_access_tokens_and_tokens_without_a_type_are_accepted(issuer: Issuer) -> None:
    settings = AuthSettings(**issuer.settings())
    async with open_key_set(issuer) as keys:
        for type_ in ("JWT", "jwt", "at+jwt", "application/at+jwt", None):
            assert (await tokens.identify(issuer.token(typ=type_), keys, settings))[0].principal == "ann"


async def test_an_email_without_verification_claim_is_accepted_where_configured(issuer: Issuer) -> None:
    token = issuer.token(email_verified=None)
    async with open_key_set(issuer) as keys:
        settings = AuthSettings(**issuer.settings(unverified_email="accept"))
        assert (await tokens.identify(token, keys, settings))[0].principal == "ann"
        by_subject = AuthSettings(**issuer.settings(principal_claim="sub"))
        assert (await tokens.identify(token, keys, by_subject))[0].principal == "0001"


async def test_a_signing_key_is_used_only_for_its_own_algorithm(issuer: Issuer) -> None:
    """A set may hold other kinds of keys: a shared secret in it is nobody's proof."""
    issuer.keys.append(Key.ec("e1"))
    issuer.extra = [{"kty": "oct", "k": "c2VjcmV0", "kid": "s1"}, {"kty": "RSA", "use": "enc", "kid": "x1"}, "noise"]
    settings = AuthSettings(**issuer.settings(algorithms=("RS256", "ES256")))
    async with open_key_set(issuer) as keys:
        assert (await tokens.identify(issuer.token(key=issuer.keys[1]), keys, settings))[0].principal == "ann"
        for kid, algorithm in (("e1", "RS256"), ("k1", "ES256"), ("s1", "HS256"), ("x1", "RS256")):
            assert await keys.key(kid, algorithm) is None


async def test_the_only_key_of_an_issuer_needs_no_key_id(issuer: Issuer) -> None:
    issuer.keys = [Key.rsa(None)]
    async with open_key_set(issuer) as keys:
        assert (await tokens.identify(issuer.token(), keys, AuthSettings(**issuer.settings())))[0].principal == "ann"


# How often the issuer is asked


async def test_a_new_signing_key_is_fetched_and_a_withdrawn_one_rejected(issuer: Issuer) -> None:
    clock, settings = Clock(), AuthSettings(**issuer.settings())
    old = issuer.token()
    async with open_key_set(issuer, clock) as keys:
        await tokens.identify(old, keys, settings)
        issuer.keys = [Key.rsa("k2")]
        clock.now += jwks.REFRESH_SECONDS
        assert (await tokens.identify(issuer.token(), keys, settings))[0].principal == "ann"
        with pytest.raises(Untrusted):
            await tokens.identify(old, keys, settings)
    assert issuer.fetches == 2


async def test_a_broken_tls_connection_to_the_issuer_counts_as_an_issuer_that_is_away(tmp_path: Path) -> None:
    certificates = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(certificates[0]))
    async with (
        sending(b"no record of TLS", beneath=certificates) as port,
        httpx.AsyncClient(verify=trust) as client,
    ):
        keys = KeySet(f"https://127.0.0.1:{port}/", keep_seconds=KEEP, client=client)
        with pytest.raises(Retryable):
            await keys.key("k1", "RS256")
        await keys.aclose()


async def test_tokens_with_unknown_keys_do_not_overload_the_issuer(issuer: Issuer) -> None:
    clock, settings = Clock(), AuthSettings(**issuer.settings())

    async def refused(n: int) -> None:
        with pytest.raises(Untrusted):
            await tokens.identify(issuer.token(kid=f"made-up-{n}"), keys, settings)

    async with open_key_set(issuer, clock) as keys:
        await asyncio.gather(*(refused(n) for n in range(40)))
        assert issuer.fetches == 1
        clock.now += jwks.REFRESH_SECONDS
        await asyncio.gather(*(refused(n) for n in range(40)))
        assert issuer.fetches == 2


async def test_an_unavailable_issuer_does_not_invalidate_known_keys_for_a_while(issuer: Issuer) -> None:
    clock, settings = Clock(), AuthSettings(**issuer.settings())
    async with open_key_set(issuer, clock) as keys:
        await tokens.identify(issuer.token(), keys, settings)
        issuer.status = 503
        clock.now += KEEP - 1
        assert (await tokens.identify(issuer.token(), keys, settings))[0].principal == "ann"
        clock.now += 2 + jwks.REFRESH_SECONDS
        with pytest.raises(Retryable) as away:
            await tokens.identify(issuer.token(), keys, settings)
        assert away.value.retry_after
        issuer.status = 200
        clock.now += jwks.REFRESH_SECONDS
        assert (await tokens.identify(issuer.token(), keys, settings))[0].principal == "ann"


async def test_aging_keys_are_refreshed_without_delaying_the_request(issuer: Issuer) -> None:
    """A hanging issuer keeps nobody waiting for long whose key is known."""
    clock, settings = Clock(), AuthSettings(**issuer.settings())
    async with open_key_set(issuer, clock) as keys:
        await tokens.identify(issuer.token(), keys, settings)
        issuer.status = 0
        clock.now += jwks.FRESH_SECONDS + 1
        async with asyncio.timeout(jwks.FETCH_SECONDS / 2):
            assert (await tokens.identify(issuer.token(), keys, settings))[0].principal == "ann"


@pytest.mark.parametrize("status", [503, 302])
async def test_an_issuer_that_never_answered_is_retryable(issuer: Issuer, status: int) -> None:
    issuer.status = status
    async with open_key_set(issuer) as keys:
        for _ in range(3):
            with pytest.raises(Retryable):
                await tokens.identify(issuer.token(), keys, AuthSettings(**issuer.settings()))
    assert issuer.fetches == 1


@pytest.mark.parametrize("document", [None, [], {}, {"keys": {}}, {"keys": []}, {"keys": [{"kty": "oct", "k": "AA"}]}])
def test_a_key_set_without_a_usable_key_is_rejected(document: object) -> None:
    with pytest.raises(ValueError, match="no public signature key"):
        usable(document)


# Settings that would believe too much


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"issuer": None}, "PENSTOCK_AUTH_ISSUER"),
        ({"audience": None}, "PENSTOCK_AUTH_AUDIENCE"),
        ({"algorithms": ()}, "PENSTOCK_AUTH_ALGORITHMS"),
        ({"jwks_url": "http://issuer.example/keys"}, "https"),
        ({"jwks_url": "file:///etc/keys"}, "https"),
    ],
)
def test_authentication_settings_that_would_trust_too_much_are_misconfigured(
    changes: dict[str, object], names: str
) -> None:
    good = {"jwks_url": "https://issuer.example/keys", "issuer": "https://issuer.example", "audience": AUDIENCE}
    require(AuthSettings(**good))
    with pytest.raises(Misconfigured, match=names):
        require(AuthSettings(**good | changes))
