"""Whether a failure heals, and how long to wait: pure tables and arithmetic, one table for each thing that can fail."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal

Verdict = Literal["retry", "deferred", "poison", "misconfigured"]


def backoff(attempt: int, *, base: float, cap: float, retry_after: float | None = None, random: float) -> float:
    """Seconds to wait before trying again ("full jitter": anything up to base · 2^attempt, at most cap).

    attempt: 0 after the first failure. retry_after: what the other side asked for; the wait is never shorter, and up
    to ``base`` longer, so that those it sent away do not come back together. random: in [0, 1).
    """
    if retry_after is not None:
        return retry_after + random * base
    return random * min(cap, base * 2.0 ** min(attempt, 64))


def retry_after_seconds(headers: Mapping[str, str], *, now: datetime) -> float | None:
    """Seconds that a response asks us to wait: ``retry-after-ms``, or ``Retry-After`` in seconds or as an HTTP date.

    headers: case-insensitive, or with names in lower case. None where there is none or it makes no sense. No longer
    than LONGEST_RETRY_AFTER_SECONDS: one wrong header shall not stop a worker for good.
    """
    seconds = _retry_after(headers, now=now)
    return None if seconds is None else min(seconds, LONGEST_RETRY_AFTER_SECONDS)


LONGEST_RETRY_AFTER_SECONDS = 3600.0


def _retry_after(headers: Mapping[str, str], *, now: datetime) -> float | None:
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if value is None or (seconds := _number(value)) is not None:
        return None if value is None else seconds
    try:
        then = parsedate_to_datetime(value)
    except ValueError:
        return None
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return max(0.0, (then - now).total_seconds())


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


HttpVerdict = Literal["retry", "quota", "poison", "misconfigured"]

_HTTP: Mapping[int, HttpVerdict] = {
    400: "poison",  # this request's content; the caller proves that it is not every request's
    402: "quota",  # how some compatible servers say what OpenAI says with insufficient_quota
    408: "retry",
    409: "retry",
    413: "poison",
    422: "poison",
    425: "retry",
    429: "retry",
}


def classify_http(status: int | None, code: str | None = None) -> HttpVerdict:
    """An embedding server's answer. status: None when there was none (refused, cut, timed out). code: the error's code
    or type in the body. "quota": it heals when somebody pays, so ask seldom."""
    if status is None or status >= 500:
        return "retry"
    if status == 429 and code == "insufficient_quota":
        return "quota"
    return _HTTP.get(status, "misconfigured")


_SQLSTATE: Mapping[str, Verdict] = {
    # Whole codes first, then classes (the first two characters); PostgreSQL's appendix A names them.
    # "deferred": however often it fails, and whoever gets through meanwhile, it is no fault of the record.
    "25006": "deferred",  # read-only transaction: the primary has just changed
    "25P03": "retry",  # idle in transaction for too long: the session is gone
    "25P04": "retry",  # transaction timeout
    "53100": "deferred",  # disk full: a small change still finds room where a large text does not
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
    """A psycopg error by its ``sqlstate``. None (the connection broke, no word from the server): retry. A class that
    is not in the table (42, 28, 3D, 0A, XX …) is no fault of one record and heals only by hand: misconfigured."""
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
    """One item of an Elasticsearch bulk answer. op: index, create, update or delete."""
    if 200 <= status < 300 or (status == 404 and op == "delete"):
        return "ok"
    if status >= 500:
        return "retry"
    return _ES_ITEM.get(status, "misconfigured")
