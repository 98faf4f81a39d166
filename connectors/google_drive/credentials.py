"""Access tokens of a service account: from its key, or without one through workload identity (google-auth).

https://google-auth.readthedocs.io/en/latest/reference/google.auth.impersonated_credentials.html. Without a key, the
account is impersonated through the IAM Credentials API by what the machine or the configuration proves to be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import google.auth
import httpx
from google.auth import aws, exceptions, identity_pool, impersonated_credentials, transport
from google.oauth2 import service_account

from connectors.google_drive.options import GoogleDriveOptions
from connectors.web.token import RenewedToken
from pipeline.core.addresses import is_https_or_local
from pipeline.core.errors import Misconfigured, Retryable

CLOUD_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
"""The scope of what impersonates the account; the tokens that read have only the scopes that reading needs."""
AWS_PROOF = "urn:ietf:params:aws:token-type:aws4_request"
"""The type of what a machine at AWS proves; all others are read from a file or an address."""
TOKEN_SECONDS = 30.0
"""For one request for a token."""


class _Response(transport.Response):
    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    @property
    def status(self) -> int:
        return self._response.status_code

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    @property
    def data(self) -> bytes:
        return self._response.content


class Transport(transport.Request):
    """Sends google-auth's requests. It blocks."""

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> _Response:
        seconds = timeout or TOKEN_SECONDS
        try:
            with httpx.Client(timeout=seconds, trust_env=False) as client:
                return _Response(client.request(method, url, content=body, headers=dict(headers or {})))
        except httpx.HTTPError as error:
            raise exceptions.TransportError(f"no response ({type(error).__name__})") from None  # type: ignore[no-untyped-call]


class Account:
    """A service account, and how it proves who it is. Its repr shows the address only."""

    def __init__(self, options: GoogleDriveOptions) -> None:
        """Raises Misconfigured without quoting the key."""
        self._key: service_account.Credentials | None = None
        self._configuration: Mapping[str, Any] | None = None
        fields = _parse(options.service_account_key.get_secret_value()) if options.service_account_key else None
        if fields is not None and fields["type"] == "service_account":
            self._key = _with_key(fields)
            self.email = str(fields["client_email"])
            return
        impersonated = None
        if fields is not None:
            # What it proves is not the account: the account is impersonated by it, also on behalf of users.
            impersonated = str(fields.pop("service_account_impersonation_url", "")).rpartition("/")[2]
            self._configuration = fields
        email = options.service_account or (impersonated or "").partition(":")[0]
        if not email:
            raise Misconfigured("service_account is not set: the address of the account that workload identity gives")
        self.email = email

    def __repr__(self) -> str:
        return f"Account({self.email!r})"

    @property
    def has_key(self) -> bool:
        return self._key is not None

    def credentials(self, scopes: str, subject: str | None) -> Any:
        """Return credentials of google-auth for these scopes, separated by spaces, as itself or as the subject. Blocks.
        Raises the errors of google-auth."""
        names = scopes.split()
        if self._key is not None:
            return self._key.with_scopes(names).with_subject(subject)
        if self._configuration is None:
            source, _ = google.auth.default(scopes=[CLOUD_SCOPE], request=Transport())
        else:
            kind = aws if self._configuration.get("subject_token_type") == AWS_PROOF else identity_pool
            source = kind.Credentials.from_info(self._configuration, scopes=[CLOUD_SCOPE])
        return impersonated_credentials.Credentials(  # type: ignore[no-untyped-call]
            source_credentials=source, target_principal=self.email, target_scopes=names, subject=subject
        )


def _parse(text: str) -> dict[str, Any]:
    """text: the JSON, or the path of the file that holds it."""
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text.strip()).expanduser().read_text()
        except (OSError, ValueError):
            raise Misconfigured(
                "service_account_key is neither a JSON key nor the path of a file that can be read"
            ) from None
    try:
        fields = json.loads(text)
    except ValueError:
        raise Misconfigured("the service account key is not valid JSON: it may have been cut or quoted") from None
    if not isinstance(fields, dict) or fields.get("type") not in ("service_account", "external_account"):
        raise Misconfigured(
            "the key is not a service account's (it has another type): create a service account key, or a configuration"
            " of workload identity (external_account)"
        )
    return fields


def _with_key(fields: Mapping[str, Any]) -> Any:
    if not is_https_or_local(str(fields.get("token_uri", ""))):
        raise Misconfigured("the service account key's token_uri is not an https address: create a new key")
    try:
        return service_account.Credentials.from_service_account_info(fields)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, exceptions.GoogleAuthError):  # the error's text could hold the key
        raise Misconfigured("the service account key lacks client_email or private_key, or they are damaged") from None


class Bearer(RenewedToken):
    """The access tokens of a service account for some scopes, as itself or on behalf of a user.

    Raises Misconfigured when Google issues none; the message says what has to be granted where.
    """

    def __init__(self, account: Account, scopes: str, subject: str | None) -> None:
        super().__init__()
        self._account = account
        self._scopes = scopes
        self._subject = subject

    def __repr__(self) -> str:
        return f"Bearer({self._account!r}, {self._scopes!r}, {self._subject!r})"

    async def request_token(self) -> tuple[str, float]:
        try:
            return await asyncio.to_thread(self._request)
        except exceptions.TransportError as error:
            raise Retryable(f"Google's token endpoint: {error}") from None
        except exceptions.DefaultCredentialsError:
            raise Misconfigured(
                "this machine has no credentials of Google: set service_account_key, or set up workload identity"
            ) from None
        except (exceptions.GoogleAuthError, ValueError) as error:
            if getattr(error, "retryable", False):
                raise Retryable("Google's token endpoint does not respond properly") from None
            raise Misconfigured(self._refusal(_code(error))) from None

    def _request(self) -> tuple[str, float]:
        credentials = self._account.credentials(self._scopes, self._subject)
        credentials.refresh(Transport())
        expiry = credentials.expiry.replace(tzinfo=UTC)
        return str(credentials.token), (expiry - datetime.now(UTC)).total_seconds()

    def _refusal(self, code: str | None) -> str:
        who = f"service account {self._account.email}"
        if code == "unauthorized_client":
            return (
                f"{who} may not act for {self._subject}: in the Admin console (Security > API controls > Domain-wide"
                f" delegation) add its client id with the scope {self._scopes}"
            )
        if code == "invalid_grant" and self._account.has_key:
            return f"{who} is refused (invalid_grant): the key was deleted, this machine's clock is wrong" + (
                f", or {self._subject} is not an active user" if self._subject else ""
            )
        if self._account.has_key or code in ("invalid_grant", "invalid_scope"):
            return f"{who} gets no access token ({code or 'no code'})"
        return (
            f"workload identity gets no access token of {who} ({code or 'no code'}): grant it Service Account Token"
            " Creator on that account, and enable the IAM Service Account Credentials API"
        )


def _code(error: Exception) -> str | None:
    """Return the code of an error of google-auth, whose other texts quote responses."""
    for part in error.args[1:]:
        fields = part
        if isinstance(part, str):
            try:
                fields = json.loads(part)
            except ValueError:
                continue
        code = fields.get("error") if isinstance(fields, Mapping) else None
        if isinstance(code, Mapping):
            code = code.get("status")
        if isinstance(code, str) and code.replace("_", "").isalnum():
            return code
    return None
