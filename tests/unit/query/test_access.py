"""The rule of access on literals, and names that lead nowhere."""

from __future__ import annotations

import pytest

from query.access.callers import Caller, Decision, Readable, decide, identify, readable

ANN = Caller("acme", frozenset({"wiki/staff", "wiki/user:ann"}))


@pytest.mark.parametrize(
    ("acl", "required", "decision"),
    [
        (["wiki/staff"], [], Decision(True, ("wiki/staff",), ())),
        (["wiki/board", "wiki/user:ann"], [], Decision(True, ("wiki/user:ann",), ())),
        (["wiki/staff"], ["wiki/nda"], Decision(False, ("wiki/staff",), ("wiki/nda",))),
        (["wiki/staff"], ["wiki/staff"], Decision(True, ("wiki/staff",), ())),
        ([], [], Decision(False, (), ())),
        (["*", "wiki/*", "wiki/STAFF", "drive/staff", "staff"], [], Decision(False, (), ())),
    ],
)
def test_access_needs_any_acl_tag_and_all_required_tags(
    acl: list[str], required: list[str], decision: Decision
) -> None:
    assert decide(ANN, acl, required) == decision


class NoConnection:
    """Answers nothing: whoever asks it fails the test."""


async def test_a_tenant_name_that_is_invalid_text_has_no_tags() -> None:
    for tenant in ("a\x00cme", "acme\udcff"):
        caller = await identify(NoConnection(), tenant, principals=["ann"], tags=["staff"])  # type: ignore[arg-type]
        assert caller == Caller("", frozenset())


async def test_a_caller_without_tags_reads_nothing_without_a_query() -> None:
    assert await readable(NoConnection(), Caller("acme", frozenset())) == Readable((), (), ())  # type: ignore[arg-type]
