"""The signed assertion, as Google's page on service accounts describes it."""

from __future__ import annotations

import json

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from connectors.google_drive.client import ServiceAccount

KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
PEM = KEY.private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
).decode()
ACCOUNT = json.dumps(
    {
        "type": "service_account",
        "client_email": "bot@project.iam.gserviceaccount.com",
        "private_key": PEM,
        "private_key_id": "k1",
        "token_uri": "https://oauth2.googleapis.com/token",
    }
)


def claims(subject: str | None) -> dict[str, object]:
    assertion = ServiceAccount(ACCOUNT).assertion("one two", subject, 1_000_000.7)
    assert jwt.get_unverified_header(assertion) == {"alg": "RS256", "typ": "JWT", "kid": "k1"}
    return jwt.decode(
        assertion,
        KEY.public_key(),
        algorithms=["RS256"],
        audience="https://oauth2.googleapis.com/token",
        options={"verify_exp": False},
    )


def test_an_assertion_without_a_subject_names_the_account_alone() -> None:
    assert claims(None) == {
        "iss": "bot@project.iam.gserviceaccount.com",
        "scope": "one two",
        "iat": 1_000_000,
        "exp": 1_003_600,
        "aud": "https://oauth2.googleapis.com/token",
    }


def test_an_assertion_for_a_user_names_its_subject() -> None:
    assert claims("ines@example.com")["sub"] == "ines@example.com"


def test_the_private_key_is_not_in_repr_or_vars() -> None:
    account = ServiceAccount(ACCOUNT)
    assert repr(account) == "ServiceAccount('bot@project.iam.gserviceaccount.com')"
    assert "PRIVATE" not in str(vars(account))
