"""The catalogue of vendors' misbehaviour, and each entry of it as a law of its kind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from connectors.confluence.playground import ConfluenceDataCenter
from connectors.conform.misbehaviour import entries_of, show
from connectors.conform.run import try_entry
from connectors.conform.trial import Broken
from connectors.declared import source_class
from connectors.fakes.misbehaviour import Entry, Fault, catalogue

ENTRIES = catalogue()
QUICKLY = frozenset(
    {
        "confluence-unreadable-ancestor-fails-the-batch",
        "confluence-dc-permissions-500",
        "jira-project-unknown-to-search",
        "jira-dc-archived-project-without-permissions",
    }
)
"""Entries that every run of the tests shows; the others take minutes together."""
MINIMUM = {
    "airbyte": 12,
    "connectors.airbyte.playground:ChangesStream": 2,
    "confluence": 25,
    "connectors.confluence.playground:ConfluenceDataCenter": 15,
    "google-drive": 12,
    "jira": 9,
    "connectors.jira.playground:JiraDataCenter": 4,
    "slack": 20,
    "git": 4,
    "github": 15,
    "sharepoint": 13,
    "web": 7,
    "connectors.objects.playground:S3Objects": 5,
}
"""The entries that each kind has at least."""


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.id, marks=() if e.id in QUICKLY else pytest.mark.slow) for e in ENTRIES],
)
async def test_misbehaviour_of_a_vendor(entry: Entry) -> None:
    verdict = await try_entry(entry)
    assert verdict.holds, verdict.why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"outcome": "tolerated"}, "documents cannot be read any more"),
        ({"outcome": "stops"}, "does not report that it cannot go on"),
        ({"documents": ["far", "zeal"]}, "documents can still be read"),
        ({"says": "a quokka"}, "the status does not say 'a quokka'"),
        ({"faults": [Fault(request="GET /nowhere", status=500)]}, "the fault was never shown"),
    ],
)
async def test_an_entry_with_a_wrong_outcome_breaks_its_law(
    change: dict[str, object], why: str, tmp_path: Path
) -> None:
    [entry] = [entry for entry in ENTRIES if entry.id == "confluence-dc-permissions-500"]
    with pytest.raises(Broken, match=why):
        await show(entry.model_copy(update=change), tmp_path)


def test_the_catalogue_names_a_public_source_for_each_entry_once() -> None:
    assert [name for name, n in Counter(entry.id for entry in ENTRIES).items() if n > 1] == []
    assert all(entry.source.startswith("https://") for entry in ENTRIES)
    kinds = Counter(entry.kind for entry in ENTRIES)
    assert {kind: n for kind, n in kinds.items() if n < MINIMUM[kind]} == {}
    assert kinds.keys() == MINIMUM.keys()


def test_only_the_kind_of_an_entry_has_its_law() -> None:
    assert entries_of(source_class("slack")).keys() == {e.id for e in ENTRIES if e.kind == "slack"}
    variants = {e.id for e in ENTRIES if "onfluence" in e.kind}
    assert entries_of(source_class("confluence")).keys() == variants > entries_of(ConfluenceDataCenter).keys()
    assert entries_of(source_class("examples.notes:Notes")) == {}
