"""Webhooks to other systems: which events an endpoint receives, how a request is signed, and when it is tried again.
Pure: the caller passes the time and random numbers.

Requests follow Standard Webhooks 1.0 (headers ``webhook-id``, ``webhook-timestamp``, ``webhook-signature``), and their
bodies are CloudEvents 1.0 in structured mode.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pipeline.core.patterns import matches

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
"""The names that an endpoint may have."""
EVENT_ID = re.compile(r"[!-~]{1,200}")
"""The ids that an event may have, because a header holds them."""
CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
TEST_TYPE = "io.penstock.webhook.test.v1"
SALT_BYTES = 16
_CONTEXT = b"penstock-webhook-secret-v1"
_CHECK = b"penstock-webhook-check-v1"

RETRY_BASE_SECONDS = 5.0
RETRY_CAP_SECONDS = 3_600.0


@dataclass(frozen=True, slots=True)
class Secret:
    """The key of an endpoint's signatures. The ledger holds ``salt`` and ``check`` only: without the installation's key
    nobody can make a signature from them."""

    salt: bytes
    check: bytes
    """Shows whether a key is the one that the secret was made with."""

    @classmethod
    def new(cls, key: str, salt: bytes) -> Secret:
        """key: the installation's. salt: SALT_BYTES random bytes."""
        return cls(salt, _check(_derived(key, salt)))

    def bytes_of(self, key: str) -> bytes | None:
        """The 32 bytes of the secret; None where the key is another one."""
        secret = _derived(key, self.salt)
        return secret if hmac.compare_digest(_check(secret), self.check) else None


def printed(secret: bytes) -> str:
    """The secret as receivers are given it."""
    return "whsec_" + base64.b64encode(secret).decode()


def _derived(key: str, salt: bytes) -> bytes:
    return hmac.digest(key.encode(), _CONTEXT + salt, "sha256")


def _check(secret: bytes) -> bytes:
    return hmac.digest(secret, _CHECK, "sha256")[:8]


def headers(secrets: Sequence[bytes], id_: str, at: datetime, body: bytes) -> dict[str, str]:
    """The headers of a request, signed with each of the secrets: two while one replaces the other. at: now."""
    timestamp = str(int(at.timestamp()))
    signed = b".".join((id_.encode(), timestamp.encode(), body))
    signatures = [base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets]
    return {
        "content-type": CONTENT_TYPE,
        "webhook-id": id_,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def cloud_event(*, id_: str, type_: str, source: str, time: str, data: Any) -> bytes:
    """A CloudEvent in structured mode. time: RFC 3339. data: JSON."""
    event = {
        "specversion": "1.0",
        "id": id_,
        "type": type_,
        "source": source,
        "time": time,
        "datacontenttype": "application/json",
        "data": data,
    }
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Subscription:
    """The events that an endpoint receives: of one tenant, and of some or all of its sources."""

    name: str
    tenant: str
    sources: tuple[str, ...]
    """Patterns, in which ``*`` matches any characters. Empty: all sources."""
    since: datetime
    """When the endpoint was added."""
    answers: bool = False
    """True if it also receives the news of standing questions, whose tenant it has; they have no source."""
    conflicts: bool = False
    """True if it also receives the news of contradictions, whose tenant it has; their documents may be of two
    sources."""

    def includes_answers(self, tenant: str, at: datetime) -> bool:
        """Whether the news of a standing question are for this endpoint. at: when they were announced."""
        return self.answers and self._is_served(tenant, at)

    def includes_conflicts(self, tenant: str, at: datetime) -> bool:
        """Whether the news of a contradiction are for this endpoint. at: when they were announced."""
        return self.conflicts and self._is_served(tenant, at)

    def includes(self, tenant: str, source: str, at: datetime) -> bool:
        """Whether an event of a document is for this endpoint. at: when it was announced, by the clock of a worker."""
        if not self._is_served(tenant, at):
            return False
        return not self.sources or any(matches(pattern, source) for pattern in self.sources)

    def _is_served(self, tenant: str, at: datetime) -> bool:
        return tenant == self.tenant and at >= self.since - CLOCKS_DIFFER


CLOCKS_DIFFER = timedelta(minutes=5)
"""An endpoint also receives what was announced so long before it was added: the clocks of processes may differ by so
much, and no event may be lost."""


def wait_seconds(failures: int, *, retry_after: float | None, random: float) -> float:
    """The seconds until the next attempt: 5, doubled with each failure up to an hour, of which the upper half is drawn.
    failures: 1 after the first one. retry_after: the seconds that the receiver has asked for. random: in [0, 1)."""
    wait = min(RETRY_CAP_SECONDS, RETRY_BASE_SECONDS * 2.0 ** min(failures - 1, 32)) * (0.5 + random / 2)
    return max(wait, min(retry_after or 0.0, RETRY_CAP_SECONDS))
