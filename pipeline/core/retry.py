"""Classifying failures, with one table for each service, and computing how long to wait. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal

Verdict = Literal["retry", "deferred", "poison", "misconfigured"]


def backoff(attempt: int, *, base: float, cap: float, retry_after: float | None = None, random: float) -> float:
    """Seconds to wait before the next attempt ("full jitter": between 0 and base · 2^attempt, at most cap).

    attempt: 0 after the first failure. retry_after: the seconds that the service has asked for; the wait is never
    shorter, and up to ``base`` longer, so that not all clients come back at once. random: in [0, 1).
    """
    if retry_after is not None:
        return retry_after + random * base
    return random * min(cap, base * 2.0 ** min(attempt, 64))


def retry_after_seconds(headers: Mapping[str, str], *, now: datetime) -> float | None:
    """The seconds that a response asks us to wait, from ``retry-after-ms``, or from ``Retry-After`` in seconds or as an
    HTTP date. None: it does not, or the header is invalid.

    headers: case-insensitive, or with names in lower case. At most LONGEST_RETRY_AFTER_SECONDS, so that a wrong header
    does not stop a worker for days.
    """
    seconds = _retry_after(headers, now=now)
    return None if seconds is None else min(seconds, LONGEST_RETRY_AFTER_SECONDS)


LONGEST_RETRY_AFTER_SECONDS = 3600.0


def _retry_after(headers: Mapping[str, str], *, now: datetime) -> float | None:
    if (milliseconds := non_negative(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if value is None or (seconds := non_negative(value)) is not None:
        return None if value is None else seconds
    then = http_date(value)
    return None if then is None else max(0.0, (then - now).total_seconds())


def http_date(text: str) -> datetime | None:
    """The moment of a date as HTTP and mail write it; without a zone it is in UTC. None: it is no such date."""
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # the latter for numbers of many digits
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def non_negative(value: str | None) -> float | None:
    """The finite number of at least 0 that a header states; None: it states none."""
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


HttpVerdict = Literal["retry", "quota", "poison", "misconfigured"]
QUOTA_WAIT_SECONDS = 60.0
"""After a ``quota``: somebody has to pay first, so one attempt a minute is enough."""

_HTTP: Mapping[int, HttpVerdict] = {
    400: "poison",  # because of the request's content; the caller checks that not every request gets it
    402: "quota",  # some compatible servers answer this where OpenAI answers insufficient_quota
    408: "retry",
    409: "retry",
    413: "poison",
    422: "poison",
    425: "retry",
    429: "retry",
}


def classify_http(status: int | None, code: str | None = None) -> HttpVerdict:
    """Classify an embedding server's answer. status: None when there was none (connection refused or broken, timeout).
    code: the error's code or type in the body. "quota": the account has no credit left, so try seldom."""
    if status is None or status >= 500:
        return "retry"
    if status == 429 and code == "insufficient_quota":
        return "quota"
    return _HTTP.get(status, "misconfigured")


_SQLSTATE: Mapping[str, Verdict] = {
    # Whole codes come before classes (the first two characters); PostgreSQL's documentation lists them in appendix A.
    # "deferred": no evidence against the record, however often it fails and whatever else succeeds.
    "25006": "deferred",  # read-only transaction: the primary has just changed
    "25P03": "retry",  # idle in transaction for too long: the session is gone
    "25P04": "retry",  # transaction timeout
    "53100": "deferred",  # disk full: a small change may still succeed where a large text fails
    "53300": "deferred",  # too many connections
    "57P01": "deferred",  # shutdown by an administrator
    "57P02": "deferred",  # … after a crash
    "57P03": "deferred",  # starting up
    "55P03": "retry",  # lock not available
    "08": "retry",  # connection
    "40": "retry",  # rollback: serialisation, deadlock
    "53": "retry",  # resources
    "57": "retry",  # operator: statement timeout
    "58": "retry",  # the system under Postgres
    "21": "poison",  # cardinality
    "22": "poison",  # data: too long, a NUL, out of range
    "23": "poison",  # a constraint that this record breaks
    "54": "poison",  # a limit of Postgres that this record exceeds
}


def classify_sqlstate(code: str | None) -> Verdict:
    """Classify a psycopg error by its ``sqlstate``; None (the connection broke): retry. A class that is not in the
    table (42, 28, 3D, 0A, XX …) is not caused by one record, and only an operator can repair it: misconfigured."""
    if code is None:
        return "retry"
    return _SQLSTATE.get(code) or _SQLSTATE.get(code[:2], "misconfigured")


EsVerdict = Literal["ok", "stale", "retry", "poison", "misconfigured"]

_ES_ITEM: Mapping[int, EsVerdict] = {
    400: "poison",  # the mapping refuses it
    401: "misconfigured",
    403: "misconfigured",
    404: "misconfigured",  # the index is missing (auto_create_index is off)
    409: "stale",  # a newer version is there
    413: "poison",
    429: "retry",
}


def classify_es_item(status: int, op: str) -> EsVerdict:
    """Classify one item of Elasticsearch's answer to a bulk request. op: index, create, update or delete."""
    if 200 <= status < 300 or (status == 404 and op == "delete"):
        return "ok"
    if status >= 500:
        return "retry"
    return _ES_ITEM.get(status, "misconfigured")
