"""The other services of the fake Drive: access tokens, the Admin SDK's directory and push channels.

https://developers.google.com/identity/protocols/oauth2/service-account#httprest
https://developers.google.com/workspace/admin/directory/reference/rest/v1/members/list
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from connectors.fakes.google_drive_corpus import Corpus
from connectors.fakes.google_drive_responses import (
    ApiError,
    OAuthError,
    Pages,
    bad_credentials,
    flag,
    insufficient_scopes,
    missing,
)

DEFAULT_CHANNEL_LIFE = timedelta(hours=1)
MAX_CHANNEL_LIFE = timedelta(days=7)
"""The longest life of a channel on changes; one on a single file lives for a day at most."""


@dataclass(slots=True)
class Channel:
    id: str
    resource: str
    uri: str
    address: str
    token: str | None
    expires_at: datetime
    drive: str | None
    notified: int
    """The number of the newest change that was sent to it."""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


@dataclass(frozen=True, slots=True)
class Notification:
    """A POST that Google sends, with an empty body. Header names are in lower case."""

    address: str
    headers: Mapping[str, str]


class Channels:
    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.open: dict[str, Channel] = {}
        self._used: set[str] = set()
        self._outbox: list[Notification] = []

    def watch(self, body: Mapping[str, Any], *, drive: str | None, uri: str) -> dict[str, Any]:
        for name in ("id", "type", "address"):
            if not body.get(name):
                raise missing(name)
        if body["type"] not in ("web_hook", "webhook"):
            raise ApiError(400, "channelUnknownType", f"Unknown channel type: {body['type']}")
        address = urlsplit(str(body["address"]))
        if address.scheme != "https" and address.hostname not in ("127.0.0.1", "localhost"):
            # Google accepts https only. The fake also accepts this machine's own address.
            raise ApiError(400, "push.webhookUrlNotHttps", f"WebHook callback must be HTTPS: {body['address']}")
        if body["id"] in self._used:
            raise ApiError(400, "channelIdNotUnique", f"Channel id {body['id']} not unique")
        now = self._corpus.now()
        expiration = body.get("expiration")
        expires_at = datetime.fromtimestamp(int(expiration) / 1000, UTC) if expiration else now + DEFAULT_CHANNEL_LIFE
        if expires_at <= now:
            raise ApiError(400, "channelExpired", "Requested expiration time is in the past")
        channel = Channel(
            id=str(body["id"]),
            resource=f"res-{drive or 'user'}",
            uri=uri,
            address=str(body["address"]),
            token=body.get("token"),
            expires_at=min(expires_at, now + MAX_CHANNEL_LIFE),
            drive=drive,
            notified=self._newest(drive),
        )
        self._used.add(channel.id)
        self.open[channel.id] = channel
        self._outbox.append(self._notification(channel, "sync"))
        return {
            "kind": "api#channel",
            "id": channel.id,
            "resourceId": channel.resource,
            "resourceUri": channel.uri,
            "expiration": str(int(channel.expires_at.timestamp() * 1000)),
            **({"token": channel.token} if channel.token else {}),
        }

    def stop(self, body: Mapping[str, Any]) -> None:
        channel = self.open.get(str(body.get("id")))
        if channel is None or channel.resource != body.get("resourceId"):
            raise ApiError(404, "notFound", f"Channel '{body.get('id')}' not found for project 'penstock-test'")
        del self.open[channel.id]

    def take(self) -> list[Notification]:
        """Return the notifications since the last call. Several changes may share one notification."""
        for channel in list(self.open.values()):
            newest = self._newest(channel.drive)
            if channel.expires_at <= self._corpus.now():
                del self.open[channel.id]
            elif newest > channel.notified:
                channel.notified = newest
                self._outbox.append(self._notification(channel, "change"))
        sent, self._outbox = self._outbox, []
        return sent

    def _newest(self, drive: str | None) -> int:
        return max((change.number for change in self._corpus.changes if change.log == drive), default=0)

    def _notification(self, channel: Channel, state: str) -> Notification:
        headers = {
            "x-goog-channel-id": channel.id,
            "x-goog-channel-expiration": format_datetime(channel.expires_at.astimezone(UTC), usegmt=True),
            "x-goog-resource-id": channel.resource,
            "x-goog-resource-uri": channel.uri,
            "x-goog-resource-state": state,
            "x-goog-message-number": str(next(channel.numbers)),
            **({"x-goog-channel-token": channel.token} if channel.token else {}),
        }
        return Notification(channel.address, headers)


JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
IMPERSONATION = "/v1/projects/-/serviceAccounts"
IDENTITY = "a-token-of-another-identity-provider"
FEDERATED = "principal://iam.googleapis.com/projects/1/subject/penstock"
GOOGLE_AUDIENCE = "https://oauth2.googleapis.com/token"
"""The audience that Google's own libraries always name."""
TOKEN_SECONDS = 3599
MAX_ASSERTION_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Token:
    account: str
    """The account whose access it has: the service account, or the user on whose behalf it acts."""
    scopes: frozenset[str]
    expires_at: float
    """Unix time."""


@cache
def _key_pair() -> rsa.RSAPrivateKey:
    """Generate the key once for each process, because that is slow."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class Tokens:
    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._private = _key_pair()
        self.delegated: dict[str, set[str]] = {}
        """Service account → the scopes that it may use on behalf of the domain's users."""
        self.impersonated: set[str] = set()
        """Service accounts that the federated identity may impersonate."""
        self.issued: dict[str, Token] = {}

    def key(self, account: str, url: str) -> str:
        """Return the JSON key file of a service account; ``url`` is this server's."""
        pem = self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return json.dumps(
            {
                "type": "service_account",
                "project_id": "penstock-test",
                "private_key_id": "k1",
                "private_key": pem.decode(),
                "client_email": account,
                "client_id": "100000000000000000001",
                "auth_uri": f"{url}/auth",
                "token_uri": f"{url}/token",
            }
        )

    def workload_identity(self, account: str, url: str, proof: str) -> str:
        """Return a configuration of workload identity for an account; ``proof`` is the path of a file that holds the
        token of another identity provider, which has to be ``IDENTITY``."""
        return json.dumps(
            {
                "type": "external_account",
                "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
                "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
                "token_url": f"{url}/sts",
                "credential_source": {"file": proof},
                "service_account_impersonation_url": f"{url}{IMPERSONATION}/{account}:generateAccessToken",
            }
        )

    def exchange(self, form: Mapping[str, str]) -> dict[str, Any]:
        """Exchange the token of another identity provider (sts.googleapis.com)."""
        if form.get("grant_type") != EXCHANGE or form.get("subject_token") != IDENTITY:
            raise OAuthError(400, "invalid_grant", "The given credential is rejected by the attribute condition.")
        return self._issue(FEDERATED, frozenset(str(form.get("scope", "")).split()))

    def impersonate(self, authorization: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer ``generateAccessToken`` or ``signJwt`` of the IAM Credentials API."""
        token = self.bearer(authorization, {f"{AUTH}cloud-platform", f"{AUTH}iam"})
        account, _, method = name.partition(":")
        if token is None or token.account != FEDERATED or account not in self.impersonated:
            raise OAuthError(403, "PERMISSION_DENIED", f"Permission 'iam.serviceAccounts.{method}' denied")
        if method == "signJwt":
            return {"keyId": "k1", "signedJwt": jwt.encode(json.loads(body["payload"]), self._private, "RS256")}
        issued = self._issue(account, frozenset(body["scope"]))
        expires_at = (self._corpus.now() + timedelta(seconds=TOKEN_SECONDS)).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"accessToken": issued["access_token"], "expireTime": expires_at}

    def _issue(self, account: str, scopes: frozenset[str]) -> dict[str, Any]:
        name = f"ya29.{secrets.token_urlsafe(24)}"
        self.issued[name] = Token(account, scopes, self._corpus.now().timestamp() + TOKEN_SECONDS)
        return {"access_token": name, "expires_in": TOKEN_SECONDS, "token_type": "Bearer"}

    def grant(self, form: Mapping[str, str], url: str) -> dict[str, Any]:
        if form.get("grant_type") != JWT_BEARER:
            raise OAuthError(400, "unsupported_grant_type", f"Invalid grant_type: {form.get('grant_type', '')}")
        claims = self._verify(form.get("assertion", ""), url)
        issuer, subject = claims["iss"], claims.get("sub") or claims["iss"]
        scopes = frozenset(str(claims.get("scope", "")).split())
        if not scopes:
            raise OAuthError(400, "invalid_scope", "Invalid OAuth scope or ID token audience provided.")
        if subject != issuer:
            if not scopes <= self.delegated.get(issuer, set()):
                raise OAuthError(
                    401,
                    "unauthorized_client",
                    "Client is unauthorized to retrieve access tokens using this method, or client not authorized for"
                    " any of the scopes requested.",
                )
            if self._corpus.users.get(subject, True):
                raise OAuthError(400, "invalid_grant", "Invalid email or User ID")
        return self._issue(subject, scopes)

    def _verify(self, assertion: str, url: str) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                assertion,
                self._private.public_key(),
                algorithms=["RS256"],
                audience=[f"{url}/token", GOOGLE_AUDIENCE],
                options={"verify_exp": False, "verify_iat": False, "require": ["iss", "aud", "exp", "iat"]},
            )
        except jwt.InvalidAudienceError:
            raise OAuthError(400, "invalid_grant", "Invalid JWT: Failed audience check.") from None
        except jwt.PyJWTError:
            raise OAuthError(400, "invalid_grant", "Invalid JWT Signature.") from None
        now = self._corpus.now().timestamp()
        if claims["exp"] < now or claims["exp"] - claims["iat"] > MAX_ASSERTION_SECONDS or claims["iat"] > now + 300:
            raise OAuthError(
                400,
                "invalid_grant",
                "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe. Check your"
                " iat and exp values in the JWT claim.",
            )
        if claims["iss"] not in self._corpus.users:
            raise OAuthError(400, "invalid_grant", "Invalid grant: account not found")
        return claims

    def bearer(self, authorization: str, accepted: Collection[str]) -> Token | None:
        """Return the token, or None if it has none of the accepted scopes. Raises ApiError for an invalid or expired
        one."""
        scheme, _, name = authorization.partition(" ")
        token = self.issued.get(name)
        if scheme != "Bearer" or token is None or token.expires_at <= self._corpus.now().timestamp():
            raise bad_credentials()
        return token if token.scopes & set(accepted) else None


AUTH = "https://www.googleapis.com/auth/"
MEMBER_SCOPES = (f"{AUTH}admin.directory.group.member.readonly", f"{AUTH}admin.directory.group.readonly")
USER_SCOPES = (f"{AUTH}admin.directory.user.readonly",)

ALL_USERS = "*"
"""The member of a group that stands for all users of the company."""


class Directory:
    def __init__(self, corpus: Corpus, tokens: Tokens, pages: Pages) -> None:
        self._corpus = corpus
        self._tokens = tokens
        self._pages = pages
        self.admins: set[str] = set()
        """The accounts that may use the directory."""
        self.routes = [
            Route("/admin/directory/v1/groups/{key}/members", self._members, methods=["GET"]),
            Route("/admin/directory/v1/users", self._users, methods=["GET"]),
        ]

    def _administrator(self, request: Request, scopes: tuple[str, ...]) -> None:
        token = self._tokens.bearer(request.headers.get("authorization", ""), scopes)
        if token is None:
            raise insufficient_scopes()
        if token.account not in self.admins:
            raise ApiError(403, "forbidden", "Not Authorized to access this resource/api")

    async def _members(self, request: Request) -> Response:
        self._administrator(request, MEMBER_SCOPES)
        key = request.path_params["key"]
        if key not in self._corpus.groups:
            raise ApiError(404, "notFound", f"Resource Not Found: {key}", location="groupKey")
        derived = flag(request, "includeDerivedMembership")
        addresses = self._corpus.people_of(key) if derived else self._corpus.groups[key]
        members = [self._member(address) for address in sorted(addresses)]
        page, next_token = self._pages.rows(members, request.query_params, "maxResults", maximum=200, default=200)
        body = {"kind": "admin#directory#members", "etag": '"1"', "members": page}
        return JSONResponse(body | ({"nextPageToken": next_token} if next_token else {}))

    def _member(self, address: str) -> dict[str, Any]:
        page = {"kind": "admin#directory#member", "etag": '"1"', "id": address.encode().hex()[:21], "role": "MEMBER"}
        if address == ALL_USERS:
            return {**page, "type": "CUSTOMER", "status": "ACTIVE"}
        kind = "GROUP" if address in self._corpus.groups else "USER"
        status = "SUSPENDED" if self._corpus.users.get(address) else "ACTIVE"
        return {**page, "email": address, "type": kind, "status": status}

    async def _users(self, request: Request) -> Response:
        self._administrator(request, USER_SCOPES)
        domain, customer = request.query_params.get("domain"), request.query_params.get("customer")
        if not domain and customer != "my_customer":
            raise ApiError(400, "badRequest", "Bad Request")
        people = [
            {"kind": "admin#directory#user", "primaryEmail": address, "suspended": suspended, "archived": False}
            for address, suspended in sorted(self._corpus.users.items())
            if (address.endswith(f"@{domain}") if domain else not address.endswith(".gserviceaccount.com"))
        ]
        page, next_token = self._pages.rows(people, request.query_params, "maxResults", maximum=500, default=100)
        body = {"kind": "admin#directory#users", "etag": '"1"', "users": page}
        return JSONResponse(body | ({"nextPageToken": next_token} if next_token else {}))
