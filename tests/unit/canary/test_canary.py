"""Names of canaries, the messages that are published for them, and the canaries that the settings name."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

from canary import watch
from canary.telemetry import CanaryMetrics
from canary.watch import Watch, pause, poll
from canary.worker import declared
from pipeline.core.canary import LONGEST_SOURCE, PRINCIPAL, Canary, is_canary, withdrawal
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.runtime.settings import CanarySettings
from topics.messages import AccessChanged, DocumentDeleted

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def test_a_canary_has_its_own_source_and_one_reader() -> None:
    canary = Canary("acme", "wiki")
    message = canary.published("Some words.", "4f2a", NOON, 7)
    assert message.key == "acme/canary.wiki/canary"
    assert message.acl_tags == [f"user:{PRINCIPAL}"]
    assert message.content == "Some words. Canary 4f2a."
    assert is_canary(message.source)
    assert not is_canary("wiki")
    assert not is_canary("canary")


def test_the_canary_of_the_longest_source_name_is_valid() -> None:
    message = Canary("acme", "w" * LONGEST_SOURCE).deleted(NOON)
    assert len(message.source) == LONGEST_SOURCE
    assert is_canary(message.source)


def test_canary_rounds_end_in_turn_without_change_with_a_revocation_and_with_a_delete() -> None:
    assert [withdrawal(n) for n in range(4)] == [None, "access", "delete", None]
    canary = Canary("acme", "wiki")
    revoked = canary.withdrawn("access", NOON)
    assert isinstance(revoked, AccessChanged)
    assert revoked.acl_tags == []
    assert isinstance(canary.withdrawn("delete", NOON), DocumentDeleted)


def test_canaries_are_declared_as_tenant_and_source() -> None:
    assert declared(CanarySettings(sources=("acme/wiki", "acme/drive"))) == [
        Canary("acme", "wiki"),
        Canary("acme", "drive"),
    ]


@pytest.mark.parametrize("wrong", ["wiki", "/wiki", "acme/", "acme/wiki/x", ""])
def test_a_canary_setting_that_is_not_tenant_and_source_is_misconfigured(wrong: str) -> None:
    with pytest.raises(Misconfigured, match="PENSTOCK_CANARY_SOURCES: write each as tenant/source"):
        declared(CanarySettings(sources=(wrong,)))


def test_the_interval_of_canary_rounds_is_limited_to_120_seconds() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 120"):
        CanarySettings(every_seconds=350)


def test_the_pause_between_polls_grows_with_the_waiting_time() -> None:
    assert [pause(seconds) for seconds in (0, 5, 10, 30, 100, 300)] == [0.5, 0.5, 0.5, 1.5, 5, 5]


def answers(*response: bool | None) -> Callable[[], Awaitable[bool]]:
    """Return a function that gives these responses one after another; None: it fails. The last one is repeated."""
    left = list(response)

    async def look_once() -> bool:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if answer is None:
            raise Retryable("the store is away", service="postgres")
        return answer

    return look_once


async def test_a_poll_distinguishes_late_from_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MIN_POLL_SECONDS", 0.01)
    long_ago = time.monotonic() - 1
    assert await poll(answers(None, None, False), long_ago, 0.5) == ("late", "not so after 0.5 s")
    assert await poll(answers(None, True), long_ago, 0.5) is None
    monkeypatch.setattr(watch, "LAST_SEARCH_SECONDS", 0)
    assert await poll(answers(None), long_ago, 0.5) == ("unavailable", "the store is away")


def test_canaries_carry_the_databases_time_and_a_clock_difference_is_logged_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = Watch(None, None, CanaryMetrics(), CanarySettings())  # type: ignore[arg-type]
    for _ in range(2):
        one.keep_time(datetime.now(UTC) - timedelta(minutes=10))
    assert abs(one.now() - (datetime.now(UTC) - timedelta(minutes=10))) < timedelta(minutes=1)
    assert capsys.readouterr().out.count("clock_differs") == 1
