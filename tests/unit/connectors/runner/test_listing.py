"""The state that a sweep keeps about its listing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.runner import listing
from connectors.runner.listing import ListedIds, Prefixes, UnlistedParts
from connectors.runner.rows import SweepRow
from connectors.source import Unlisted


@pytest.mark.parametrize("small", [listing.SMALL, 0])
def test_lacks_returns_the_ids_that_were_not_listed(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SMALL", small)
    listed = ListedIds()
    assert listed.lacks(["a", "b"]) == ["a", "b"]
    assert listed.lacks([]) == []
    listed.add(f"{n}.md" for n in range(0, 10_000, 2))
    assert listed.lacks([f"{n}.md" for n in range(100)]) == [f"{n}.md" for n in range(1, 100, 2)]
    listed.add(["1.md"])  # after it was asked
    listed.add([])
    assert listed.lacks(["3.md", "1.md", "0.md", ""]) == ["3.md", ""]


class Counted(str):
    """A text that counts how often it is looked into."""

    looks = 0

    def startswith(self, *arguments: object) -> bool:
        Counted.looks += 1
        return super().startswith(*arguments)  # type: ignore[arg-type]


@given(st.lists(st.text("ab/", max_size=4)), st.text("ab/c", max_size=6))
def test_an_id_is_within_prefixes_if_it_begins_with_any_of_them(prefixes: list[str], external_id: str) -> None:
    assert (external_id in Prefixes(prefixes)) == external_id.startswith(tuple(prefixes))


def test_a_document_is_not_compared_with_each_part_that_was_set_aside() -> None:
    """A hundred thousand folders with an invalid sidecar file stopped all connectors for seconds at each page."""
    parts = UnlistedParts(
        [
            *(Unlisted(part=f"folder {n}", reason="invalid", id_prefix=f"folder{n:06}/") for n in range(10_000)),
            *(Unlisted(part=f"document {n}", reason="odd", is_document=True) for n in range(10_000)),
        ]
    )
    within = SweepRow(Counted("folder000007/a"), is_published=True, is_unchanged=True)
    beside = SweepRow(Counted("folder/a"), is_published=True, is_unchanged=True)
    Counted.looks = 0
    assert parts.may_hold(within)
    assert not parts.may_hold(beside)
    assert Counted.looks <= 2


def test_a_document_may_be_within_a_part_by_its_tag_or_if_it_has_none() -> None:
    def may_hold(part: Unlisted, acl_tags: Sequence[str]) -> bool:
        row = SweepRow("a/1", is_published=True, is_unchanged=True, acl_tags=acl_tags)
        return UnlistedParts([part]).may_hold(row)

    by_tag = Unlisted(part="space A", reason="refused", tag="space:A")
    assert may_hold(by_tag, ["space:A", "x"])
    assert may_hold(by_tag, [])
    assert not may_hold(by_tag, ["space:B"])
    assert may_hold(Unlisted(part="all", reason="refused"), ["space:B"])
    assert not may_hold(Unlisted(part="document 1", reason="odd", is_document=True), [])
    assert not may_hold(Unlisted(part="b", reason="refused", id_prefix="b/"), [])
