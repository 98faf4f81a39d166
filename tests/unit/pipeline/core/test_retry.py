"""Errors that a retry can resolve, errors that it cannot, and the pauses between retries."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.retry import (
    backoff,
    classify_es_item,
    classify_http,
    classify_sqlstate,
    retry_after_seconds,
)

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("attempt", "random", "seconds"),
    [(0, 0.0, 0.0), (0, 0.5, 0.25), (1, 0.5, 0.5), (3, 0.5, 2.0), (6, 0.5, 4.0), (10_000, 0.5, 4.0)],
)
def test_backoff_doubles_up_to_the_cap(attempt: int, random: float, seconds: float) -> None:
    assert backoff(attempt, base=0.5, cap=8.0, random=random) == seconds


@given(
    attempt=st.integers(0, 100),
    retry_after=st.none() | st.floats(0, 3600),
    random=st.floats(0, 1, exclude_max=True),
)
def test_backoff_respects_retry_after_and_never_exceeds_the_cap(
    attempt: int, retry_after: float | None, random: float
) -> None:
    wait = backoff(attempt, base=0.5, cap=8.0, retry_after=retry_after, random=random)
    if retry_after is None:
        assert 0 <= wait <= 8.0
    else:
        assert retry_after <= wait <= retry_after + 0.5


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "Thu, 01 Jan 2026 12:00:30 GMT"}, 30.0),
        ({"retry-after": "Thu, 01 Jan 2026 11:00:00 GMT"}, 0.0),
        ({"retry-after": "Thu, 01 Jan 2026 12:00:30 -0000"}, 30.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "tomorrow"}, None),
        ({"retry-after": "Thu, 01 Jan 99999999999999999999 12:00:00 GMT"}, None),
        ({"retry-after": "Thu, 01 Jan 2026 12:00:30 +99999999999999999999"}, None),
        ({"retry-after": "31536000"}, 3600.0),
        ({"retry-after-ms": "1e15"}, 3600.0),
        ({"retry-after": "Tue, 01 Jan 2036 12:00:00 GMT"}, 3600.0),
    ],
)
def test_retry_after_headers_are_parsed_and_limited_to_an_hour(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_seconds(headers, now=NOW) == seconds


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [
        (None, None, "retry"),
        (400, None, "poison"),
        (401, "invalid_api_key", "misconfigured"),
        (402, None, "quota"),
        (403, None, "misconfigured"),
        (404, "model_not_found", "misconfigured"),
        (405, None, "misconfigured"),
        (408, None, "retry"),
        (413, None, "poison"),
        (422, None, "poison"),
        (429, "rate_limit_exceeded", "retry"),
        (429, "insufficient_quota", "quota"),
        (500, None, "retry"),
        (503, "insufficient_quota", "retry"),
        (529, None, "retry"),
    ],
)
def test_embedding_server_statuses_are_classified(status: int | None, code: str | None, verdict: str) -> None:
    assert classify_http(status, code) == verdict


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (None, "retry"),
        ("08006", "retry"),  # connection failure
        ("40001", "retry"),  # serialisation failure
        ("40P01", "retry"),  # deadlock
        ("53100", "deferred"),  # disk full
        ("53300", "deferred"),  # too many connections
        ("55P03", "retry"),  # lock not available
        ("57014", "retry"),  # statement timeout
        ("57P01", "deferred"),  # admin shutdown
        ("58030", "retry"),  # I/O error
        ("25006", "deferred"),  # read-only transaction
        ("22001", "poison"),  # string too long
        ("22021", "poison"),  # character not in repertoire
        ("23502", "poison"),  # not null
        ("54000", "poison"),  # program limit
        ("25P02", "misconfigured"),  # in failed transaction: a bug of ours
        ("28P01", "misconfigured"),  # wrong password
        ("3D000", "misconfigured"),  # no such database
        ("42P01", "misconfigured"),  # no such table
        ("42501", "misconfigured"),  # no privilege
        ("XX000", "misconfigured"),
        ("", "misconfigured"),
    ],
)
def test_sqlstates_are_classified(code: str | None, verdict: str) -> None:
    assert classify_sqlstate(code) == verdict


@pytest.mark.parametrize(
    ("status", "op", "verdict"),
    [
        (200, "index", "ok"),
        (201, "create", "ok"),
        (200, "delete", "ok"),
        (404, "delete", "ok"),
        (404, "index", "misconfigured"),
        (409, "index", "stale"),
        (409, "delete", "stale"),
        (400, "index", "poison"),
        (401, "index", "misconfigured"),
        (403, "delete", "misconfigured"),
        (429, "index", "retry"),
        (502, "index", "retry"),
        (503, "delete", "retry"),
        (504, "index", "retry"),
        (418, "index", "misconfigured"),
    ],
)
def test_elasticsearch_bulk_item_statuses_are_classified(status: int, op: str, verdict: str) -> None:
    assert classify_es_item(status, op) == verdict
