"""The requests for access tokens, as Google's pages on service accounts describe them."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from connectors.google_drive.credentials import Account, Bearer
from connectors.google_drive.options import GoogleDriveOptions
from pipeline.core.errors import Misconfigured, Retryable

KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
PEM = KEY.private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
).decode()
TOKEN_URI = "https://oauth2.googleapis.com/token"
ACCOUNT = {
    "type": "service_account",
    "client_email": "bot@project.iam.gserviceaccount.com",
    "private_key": PEM,
    "private_key_id": "k1",
    "token_uri": TOKEN_URI,
}


def account() -> Account:
    return Account(GoogleDriveOptions(service_account_key=json.dumps(ACCOUNT), my_drive=True))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The endpoint's ``response``, and the ``request`` that it received."""
    exchange: dict[str, Any] = {"response": httpx.Response(200, json={"access_token": "t", "expires_in": 3599})}

    def request(_: httpx.Client, method: str, url: str, content: bytes, **_more: Any) -> httpx.Response:
        exchange["request"] = method, url, parse_qs(content.decode())
        if isinstance(exchange["response"], Exception):
            raise exchange["response"]
        return exchange["response"]

    monkeypatch.setattr(httpx.Client, "request", request)
    return exchange


@pytest.mark.parametrize("subject", [None, "ines@example.com"])
async def test_a_key_is_exchanged_for_a_token_of_the_account_or_of_a_user(
    answers: dict[str, Any], subject: str | None
) -> None:
    token, seconds = await Bearer(account(), "one two", subject).request_token()
    assert token == "t"
    assert 3_590 < seconds < 3_600
    method, url, form = answers["request"]
    assert (method, url) == ("POST", TOKEN_URI)
    assert form["grant_type"] == ["urn:ietf:params:oauth:grant-type:jwt-bearer"]
    [assertion] = form["assertion"]
    assert jwt.get_unverified_header(assertion) == {"alg": "RS256", "typ": "JWT", "kid": "k1"}
    claims = jwt.decode(assertion, KEY.public_key(), algorithms=["RS256"], audience=TOKEN_URI)
    assert (claims["iss"], claims["scope"]) == ("bot@project.iam.gserviceaccount.com", "one two")
    assert claims["exp"] - claims["iat"] == 3_600
    assert claims.get("sub") == subject


@pytest.mark.parametrize("failure", [httpx.Response(503, json={"error": "x"}), httpx.ConnectError("no route")])
async def test_an_endpoint_that_does_not_respond_is_tried_again(
    answers: dict[str, Any], failure: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    answers["response"] = failure
    with pytest.raises(Retryable, match="Google's token endpoint"):
        await Bearer(account(), "one", None).request_token()


async def test_a_refusal_quotes_no_response(answers: dict[str, Any]) -> None:
    answers["response"] = httpx.Response(400, json={"error": "other_error", "error_description": "CANARY"})
    with pytest.raises(Misconfigured, match=r"gets no access token \(other_error\)$"):
        await Bearer(account(), "one", None).request_token()


def test_the_private_key_is_not_in_repr_or_vars() -> None:
    assert repr(account()) == "Account('bot@project.iam.gserviceaccount.com')"
    assert "PRIVATE" not in str(vars(account()))
