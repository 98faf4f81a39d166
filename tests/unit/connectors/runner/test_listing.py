"""The state that a sweep keeps about its listing."""

from __future__ import annotations

from connectors.runner.listing import ListedIds


def test_lacks_returns_the_ids_that_were_not_listed() -> None:
    listed = ListedIds()
    assert listed.lacks(["a", "b"]) == ["a", "b"]
    assert listed.lacks([]) == []
    listed.add(f"{n}.md" for n in range(0, 10_000, 2))
    assert listed.lacks([f"{n}.md" for n in range(100)]) == [f"{n}.md" for n in range(1, 100, 2)]
    listed.add(["1.md"])  # after it was asked
    listed.add([])
    assert listed.lacks(["3.md", "1.md", "0.md", ""]) == ["3.md", ""]
