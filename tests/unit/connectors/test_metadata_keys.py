"""The metadata that sources send, and the keys that each kind declares."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace

import pytest

import connectors
from connectors import declared
from connectors.declared import BUILT_IN, metadata_keys
from connectors.paths import path_metadata
from connectors.sharepoint.content import revision_of, site_metadata
from connectors.source import Playground
from connectors.website.source import page_metadata
from pipeline.core.errors import Misconfigured

DOCS = Path(__file__).parents[3] / "docs" / "connectors"
NAMED_BY_SETTINGS = {"airbyte", "database"}
"""The settings name the columns that become metadata."""


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_key_of_a_kind_can_be_declared_and_is_explained_in_its_guide(kind: str) -> None:
    keys = metadata_keys(kind)
    assert bool(keys) == (kind not in NAMED_BY_SETTINGS)
    explained = set(re.findall(r"`([\w.-]+)`", (DOCS / f"{kind}.md").read_text("utf-8")))
    assert keys.keys() <= explained, f"{kind}.md does not name {keys.keys() - explained}"


def test_a_key_that_cannot_be_declared_is_named_with_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SimpleNamespace(metadata_keys={"labels": "keyword", "due date": "date"})
    monkeypatch.setattr(declared, "source_class", lambda kind: source)
    with pytest.raises(Misconfigured, match="'tickets': its key 'due date' cannot be declared"):
        metadata_keys("tickets")
    source.metadata_keys = {"due": "day"}
    with pytest.raises(Misconfigured, match="'due' cannot be declared as 'day'"):
        metadata_keys("tickets")
    del source.metadata_keys
    assert metadata_keys("tickets") == {}


def test_a_file_has_its_ending_and_every_folder_above_it() -> None:
    assert path_metadata("hr/policies/Travel.PDF", 7) == {
        "path": "hr/policies/Travel.PDF",
        "size": 7,
        "extension": "pdf",
        "folder": ["hr", "hr/policies"],
    }
    assert path_metadata("Makefile", 0) == {"path": "Makefile", "size": 0, "extension": ""}
    assert path_metadata(".gitignore", 0)["extension"] == ""
    assert path_metadata("a//b.tar.gz", 0) == {"path": "a//b.tar.gz", "size": 0, "extension": "gz", "folder": ["a"]}


def test_a_path_of_many_folders_does_not_fill_the_metadata() -> None:
    folder = path_metadata("f/" * 2_000 + "a.md", 1)["folder"]
    assert isinstance(folder, list)
    assert (len(folder), folder[-1]) == (20, "/".join("f" * 20))


def test_a_page_of_a_website_has_a_section_unless_it_is_at_the_top() -> None:
    assert page_metadata("https://a.example/docs/über/x") == {"path": "/docs/über/x", "section": "docs"}
    assert page_metadata("https://a.example/docs/") == {"path": "/docs/", "section": "docs"}
    assert page_metadata("https://a.example/%C3%BCber/x?y")["section"] == "über"
    assert page_metadata("https://a.example/docs") == {"path": "/docs"}
    assert page_metadata("https://a.example") == {"path": ""}


def test_a_file_of_sharepoint_has_its_site() -> None:
    def site(address: str) -> object:
        return site_metadata({"webUrl": f"https://contoso.sharepoint.com{address}"}).get("site")

    assert site("/sites/hr/Shared%20Documents/a.docx") == "sites/hr"
    assert site("/sites/hr/_layouts/15/Doc.aspx?sourcedoc=%7B1%7D") == "sites/hr"
    assert site("/personal/ann_contoso_com/Documents/a.txt") == "personal/ann_contoso_com"
    assert site("/Shared%20Documents/a.docx") is None
    assert site("/sites/a.docx") is None
    item = {"id": "1", "webUrl": "https://contoso.sharepoint.com/sites/hr/a.txt"}
    assert revision_of(item, "d") != revision_of({**item, "webUrl": item["webUrl"].replace("hr", "it")}, "d")


CHANGES_WITH_THE_DOCUMENT = {"objects", "slack", "website", "WikisPlayground"}
"""Kinds, and playgrounds of one, whose metadata change only with the id, the title or the text of a document."""


def test_the_law_relabel_is_tried_on_every_kind_whose_metadata_change_alone() -> None:
    for module in iter_modules(connectors.__path__):
        if module.ispkg and find_spec(f"connectors.{module.name}.playground"):
            playgrounds = [
                kind
                for kind in vars(import_module(f"connectors.{module.name}.playground")).values()
                if isinstance(kind, type) and {"write", "remove"} <= {*dir(kind)} and kind is not Playground
            ]
            assert playgrounds, module.name
            for playground in playgrounds:
                names = {module.name, playground.__name__}
                assert hasattr(playground, "relabel") == (not names & CHANGES_WITH_THE_DOCUMENT), playground
