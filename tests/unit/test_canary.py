"""What canaries are called, what is published for them, and which the settings name."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pipeline.canary.worker import declared
from pipeline.core.canary import LONGEST_SOURCE, PRINCIPAL, Canary, is_canary, withdrawal
from pipeline.core.errors import Misconfigured
from pipeline.settings import CanarySettings
from topics.messages import AccessChanged, DocumentDeleted

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def test_a_canary_has_a_source_of_its_own_and_one_reader() -> None:
    canary = Canary("acme", "wiki")
    message = canary.published("Some words.", "4f2a", NOON, 7)
    assert message.key == "acme/canary.wiki/canary"
    assert message.acl_tags == [f"user:{PRINCIPAL}"]
    assert message.content == "Some words. Canary 4f2a."
    assert is_canary(message.source)
    assert not is_canary("wiki")
    assert not is_canary("canary")


def test_the_longest_name_of_a_source_leaves_room_for_the_mark() -> None:
    message = Canary("acme", "w" * LONGEST_SOURCE).deleted(NOON)
    assert len(message.source) == LONGEST_SOURCE
    assert is_canary(message.source)


def test_rounds_end_in_turn_with_the_document_left_revoked_and_deleted() -> None:
    assert [withdrawal(n) for n in range(4)] == [None, "access", "delete", None]
    canary = Canary("acme", "wiki")
    revoked = canary.withdrawn("access", NOON)
    assert isinstance(revoked, AccessChanged)
    assert revoked.acl_tags == []
    assert isinstance(canary.withdrawn("delete", NOON), DocumentDeleted)


def test_the_settings_name_tenant_and_source() -> None:
    assert declared(CanarySettings(sources=("acme/wiki", "acme/drive"))) == [
        Canary("acme", "wiki"), Canary("acme", "drive"),
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", ["wiki", "/wiki", "acme/", "acme/wiki/x", ""])
def test_what_is_no_tenant_and_source_is_refused_in_one_line(wrong: str) -> None:
    with pytest.raises(Misconfigured, match="PENSTOCK_CANARY_SOURCES: write each as tenant/source"):
        declared(CanarySettings(sources=(wrong,)))
