"""The parts that Confluence and Jira have in common: accounts of people, signatures of events, options, how far
back changes are searched, and errors.

One person is the same principal in both, so that what one source grants counts for the other.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from connectors.source import Cursor, CursorExpired, Refused, Request
from connectors.web import Denied, Forbidden, Missing, Rejected, TooLarge
from pipeline.core.errors import Misconfigured, Retryable

T = TypeVar("T")

SIGNATURE, TOKEN = "x-hub-signature", "x-penstock-token"
MAX_LOOKBACK_MINUTES = 30 * 24 * 60
"""After a longer pause a sweep replaces the search for changes."""
MEDIA_HOST = "api.media.atlassian.com"
"""Where Cloud redirects downloads to (developer.atlassian.com, "Get URI to download attachment")."""


@dataclass(frozen=True, slots=True)
class Person:
    """An account, as far as the API describes it."""

    id: str
    """The account id (Cloud) or the user key (Data Center)."""
    name: str = ""
    """The display name."""
    username: str = ""
    email: str = ""


class AtlassianOptions(BaseModel):
    """The options that mean the same in both. Their subclasses declare ``base_url`` and ``site_url``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    attachments: bool = True
    """Whether to read attached files, each as a document of its own."""
    max_attachment_bytes: int = Field(default=50_000_000, gt=0)
    """Largest attachment that is downloaded."""
    principals: dict[str, str] = Field(default_factory=dict)
    """Account id (Cloud), user name or user key (Data Center) → e-mail address, where the service returns none."""
    email_domain: str | None = None
    """Data Center: user ``ann`` is ``ann@DOMAIN``. Set it only where people cannot choose their own user names."""
    concurrent_requests: int = Field(default=16, ge=1, le=64)
    """Requests that are sent at the same time: 80 a second if each takes 0.2 s. Cloud permits bursts of 100 a second
    for each endpoint."""
    media_hosts: tuple[str, ...] = (MEDIA_HOST,)
    """Hosts besides that of ``base_url`` that may serve attachments. They receive no credentials."""

    @field_validator("base_url", "site_url", check_fields=False)
    @classmethod
    def _without_slash(cls, url: str | None) -> str | None:
        return url if url is None else url.rstrip("/")

    @field_validator("principals")
    @classmethod
    def _lower_case(cls, principals: dict[str, str]) -> dict[str, str]:
        return {key: value.strip().lower() for key, value in principals.items()}


class Addresses(Protocol):
    """The settings that name the e-mail addresses of people."""

    @property
    def principals(self) -> Mapping[str, str]:
        """Account id (Cloud), user name or user key (Data Center) → e-mail address."""
        ...

    @property
    def email_domain(self) -> str | None:
        """Data Center: user ``ann`` is ``ann@DOMAIN``."""
        ...


def principal(person: Person, options: Addresses) -> str:
    """Return the person's e-mail address in lower case: from the settings, from the service, or from Data Center's user
    name in the company's domain. Without one it is ``account:ID``, which no other source knows."""
    for key in (person.id, person.username):
        if key and key in options.principals:
            return options.principals[key]
    if _is_address(person.email):
        return person.email.strip().lower()
    if options.email_domain and person.username:
        domain = options.email_domain.lstrip("@").lower()
        name = person.username.lower()
        if name.endswith(f"@{domain}"):
            return name
        if "@" not in name:
            return f"{name}@{domain}"
    return f"account:{person.username or person.id}"


def has_address(person: Person, options: Addresses) -> bool:
    """True when the account's address is known, so that requesting the account again adds nothing."""
    return not principal(person, options).startswith("account:")


def _is_address(email: str) -> bool:
    name, at, domain = email.strip().rpartition("@")
    return bool(name and at and domain) and not any(char.isspace() for char in email.strip())


def verify(request: Request, secret: str | None, *, token_allowed: bool) -> bool:
    """Return True for an event with a valid signature over its bytes, and False for one that carries the secret itself.
    Raises Refused for every other. Comparisons take constant time."""
    if not secret:
        raise Refused("an event arrived, but webhook_secret is not set: set it on both sides")
    key = secret.encode()
    signature = request.headers.get(SIGNATURE, "")
    expected = "sha256=" + hmac.new(key, request.body, hashlib.sha256).hexdigest()
    if signature and hmac.compare_digest(signature.strip().lower().encode(), expected.encode()):
        return True
    token = request.headers.get(TOKEN, "")
    if token_allowed and token and hmac.compare_digest(token.encode(), key):
        return False
    raise Refused("an event is not signed with webhook_secret: set the same secret on both sides")


@contextmanager
def translated_errors(connector: str, guide: str) -> Iterator[None]:
    """Raise the client's errors as Misconfigured, since trying again repairs none of them, and TooLarge as Retryable.
    guide: the document that names the scopes of a token."""
    try:
        yield
    except Denied as error:
        advice = f"check that the token is valid and has the scopes that {guide} names"
        raise Misconfigured(f"{error}; {advice}") from error
    except (Missing, Forbidden, Rejected) as error:
        raise Misconfigured(f"{error}; run penstock connector check {connector} for details") from error
    except TooLarge as error:
        raise Retryable(f"{error}; a smaller page_size makes responses smaller") from error


def lookback_minutes(polled_at: datetime, now: datetime, overlap: int) -> int:
    """Return how many minutes back to search for changes. polled_at: when the last complete poll began. Raises
    CursorExpired."""
    minutes = math.ceil(max(0.0, (now - polled_at).total_seconds()) / 60) + overlap
    if minutes > MAX_LOOKBACK_MINUTES:
        raise CursorExpired("changes were not read for a month: everything is compared again")
    return minutes


def progress_of(cursor: Cursor, make: Callable[[datetime, dict[str, str]], T]) -> T:
    """Make a connector's progress of its cursor of changes: of when the last complete poll began, and of what it saw.
    Raises CursorExpired for a cursor in another format."""
    try:
        at = datetime.fromisoformat(cursor["at"])
        seen = {str(key): str(value) for key, value in cursor["seen"].items()}
        return make(at if at.tzinfo else at.replace(tzinfo=UTC), seen)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CursorExpired(
            "the cursor of changes is not in this connector's format: everything is compared again"
        ) from error
