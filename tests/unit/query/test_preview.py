"""The pure parts of a preview: the document that an edit means, and how often a phrase occurs."""

from __future__ import annotations

from uuid import uuid4

import pytest

from pipeline.core.model import Manifest
from query.model import BadQuery, Passage
from query.preview.model import Edit, ProposedDocument
from query.preview.overlaying import LedgerDocument, match
from query.retrieval.scoring import sloppy_frequency, stored_length


def known(external_id: str, path: str | None = None) -> LedgerDocument:
    id_ = uuid4()
    return LedgerDocument(Passage(id_, id_, external_id, "wiki", external_id, None, 0), path, b"", Manifest(b""))


def matched(edit: Edit, *documents: LedgerDocument) -> list[tuple[str, str | None, bool]]:
    """Path, external id of the counterpart, and whether it is deleted."""
    return [
        (of.proposed.path, of.known and of.known.passage.external_id, of.proposed.content is None)
        for of in match(edit, documents)
    ]


def test_an_external_id_outweighs_a_path_and_a_path_an_id_that_equals_it() -> None:
    documents = known("a.md", "moved.md"), known("1", "a.md"), known("b.md")
    one = Edit("wiki", [ProposedDocument("a.md", "text", external_id="a.md")])
    assert matched(one, *documents) == [("a.md", "a.md", False)]
    assert matched(Edit("wiki", [ProposedDocument("a.md", "text")]), *documents) == [("a.md", "1", False)]
    assert matched(Edit("wiki", [ProposedDocument("b.md", "text")]), *documents) == [("b.md", "b.md", False)]
    assert matched(Edit("wiki", [ProposedDocument("c.md", "text")]), *documents) == [("c.md", None, False)]


def test_a_path_of_two_documents_is_refused() -> None:
    with pytest.raises(BadQuery, match="2 documents"):
        match(Edit("wiki", [ProposedDocument("a.md")]), [known("1", "a.md"), known("2", "a.md")])


@pytest.mark.parametrize(
    ("folder", "deleted"),
    [("guide", {"guide/b.md"}), ("guide/", {"guide/b.md"}), ("", {"guide/b.md", "guides.md"}), ("/srv", {"/srv/c.md"})],
)
def test_documents_below_a_folder_that_the_edit_lacks_are_deleted(folder: str, deleted: set[str]) -> None:
    edit = Edit("wiki", [ProposedDocument("guide/a.md", "text")], [folder])
    documents = [known("1", "guide/a.md"), known("2", "guide/b.md"), known("3", "guides.md"), known("/srv/c.md")]
    expected = deleted | ({"/srv/c.md"} if folder == "" else set())
    assert {path for path, _, is_deleted in matched(edit, *documents) if is_deleted} == expected


@pytest.mark.parametrize(
    ("positions", "frequency"),
    [
        ({"red": [0], "fox": [1]}, 1.0),
        ({"red": [0], "fox": [3]}, 1 / 3),
        ({"red": [1], "fox": [0]}, 1 / 3),
        ({"red": [0, 9], "fox": [1, 10]}, 2.0),
        ({"red": [0], "fox": [60]}, 0.0),
        ({"red": [0]}, 0.0),
    ],
)
def test_a_phrase_counts_less_the_further_its_words_are_moved(
    positions: dict[str, list[int]], frequency: float
) -> None:
    assert sloppy_frequency(["red", "fox"], positions) == pytest.approx(frequency)


def test_a_word_that_a_phrase_repeats_needs_as_many_places() -> None:
    assert sloppy_frequency(["to", "be", "or", "to"], {"to": [0], "be": [1], "or": [2]}) == 0.0
    assert sloppy_frequency(["to", "be", "or", "to"], {"to": [0, 3], "be": [1], "or": [2]}) == 1.0


def test_a_length_is_stored_in_one_byte() -> None:
    assert [stored_length(n) for n in (0, 23, 39, 40, 41, 42, 100, 1_000)] == [0, 23, 39, 40, 40, 42, 96, 984]
