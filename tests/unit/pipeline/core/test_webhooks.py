"""Webhooks' pure parts: who receives an event, signatures as the standard's own library verifies them, and waits."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from pipeline.core.webhooks import (
    RETRY_CAP_SECONDS,
    Secret,
    Subscription,
    cloud_event,
    headers,
    printed,
    wait_seconds,
)

KEY, OTHER_KEY = "k" * 32, "o" * 32
NOW = datetime(2026, 1, 2, tzinfo=UTC)


def bytes_of(secret: Secret, key: str = KEY) -> bytes:
    made = secret.bytes_of(key)
    assert made is not None
    return made


@given(st.binary(min_size=16, max_size=16), st.text(max_size=50), st.text(max_size=200))
def test_any_request_is_verified_by_the_library_of_standard_webhooks(salt: bytes, id_: str, text: str) -> None:
    secret = bytes_of(Secret.new(KEY, salt))
    id_ = "e" + "".join(c for c in id_ if c.isascii() and c.isprintable())
    body = cloud_event(id_=id_, type_="t", source="/a/b", time=NOW.isoformat(), data={"text": text})
    signed = headers([secret], id_, datetime.now(UTC), body)
    event = Webhook(printed(secret)).verify(body, signed)
    assert (event["id"], event["data"], event["specversion"]) == (id_, {"text": text}, "1.0")
    for changed in (body + b" ", body.replace(b"1.0", b"1.1")):
        with pytest.raises(WebhookVerificationError):
            Webhook(printed(secret)).verify(changed, signed)


def test_a_request_is_refused_by_another_secret_and_when_it_is_old() -> None:
    secret, other = (bytes_of(Secret.new(KEY, bytes([n]) * 16)) for n in (1, 2))
    with pytest.raises(WebhookVerificationError, match="No matching"):
        Webhook(printed(other)).verify(b"{}", headers([secret], "e", datetime.now(UTC), b"{}"))
    with pytest.raises(WebhookVerificationError, match="too old"):
        Webhook(printed(secret)).verify(b"{}", headers([secret], "e", datetime.now(UTC) - timedelta(minutes=6), b"{}"))


def test_during_a_rotation_both_secrets_verify_a_request() -> None:
    secrets = [bytes_of(Secret.new(KEY, bytes([n]) * 16)) for n in (1, 2)]
    signed = headers(secrets, "e", datetime.now(UTC), b'{"a": 1}')
    assert [Webhook(printed(secret)).verify(b'{"a": 1}', signed) for secret in secrets] == [{"a": 1}] * 2


def test_a_secret_cannot_be_had_with_another_key_or_from_what_the_ledger_holds() -> None:
    secret = Secret.new(KEY, b"s" * 16)
    assert secret.bytes_of(OTHER_KEY) is None
    assert len(bytes_of(secret)) == 32
    assert secret.check not in bytes_of(secret)
    assert Secret.new(KEY, b"t" * 16).bytes_of(KEY) != secret.bytes_of(KEY)


@pytest.mark.parametrize(
    ("sources", "source", "expected"),
    [
        ((), "wiki", True),
        (("wiki",), "wiki", True),
        (("wiki",), "wiki2", False),
        (("wiki*", "drive"), "wiki2", True),
        (("*.public",), "hr.public", True),
        (("*.public",), "hrxpublic", False),
        (("a.c",), "abc", False),
    ],
)
def test_an_endpoint_receives_the_sources_that_it_names(
    sources: tuple[str, ...], source: str, *, expected: bool
) -> None:
    endpoint = Subscription("shop", "acme", sources, NOW)
    assert endpoint.includes("acme", source, NOW) is expected
    assert not endpoint.includes("other", source, NOW)


def test_a_source_that_nearly_matches_many_wildcards_is_matched_quickly() -> None:
    """A regular expression needs hours; whoever publishes chooses the name."""
    assert not Subscription("shop", "acme", ("a" + "*-" * 40 + "*b",), NOW).includes("acme", "a" + "-" * 199, NOW)


def test_an_endpoint_receives_what_was_announced_since_it_was_added_even_by_a_clock_that_is_slow() -> None:
    endpoint = Subscription("shop", "acme", (), NOW)
    assert endpoint.includes("acme", "wiki", NOW - timedelta(minutes=4))
    assert not endpoint.includes("acme", "wiki", NOW - timedelta(minutes=6))


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_waits_grow_up_to_an_hour_and_never_vanish(failures: int, random: float) -> None:
    wait = wait_seconds(failures, retry_after=None, random=random)
    assert 2.5 <= wait <= RETRY_CAP_SECONDS
    assert wait_seconds(failures + 1, retry_after=None, random=random) >= wait
    assert wait_seconds(1, retry_after=60, random=random) == 60
    assert wait_seconds(1, retry_after=1e9, random=random) == RETRY_CAP_SECONDS


def test_a_cloud_event_is_json_that_keeps_every_letter() -> None:
    body = cloud_event(
        id_="1", type_="t", source="/a", time="2026-01-02T00:00:00Z", data={"external_id": "é/\U0001f600"}
    )
    assert json.loads(body)["data"] == {"external_id": "é/\U0001f600"}
