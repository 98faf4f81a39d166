"""The fields of an entry are checked where a source makes it, so that the error names the source's own mistake."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from connectors.runner.compare import access_of
from connectors.source import Document, Gone, Group, Listed, Reaction, Unreadable
from pipeline.core.errors import Misconfigured

LISTED: dict[str, Any] = {"external_id": "4711", "acl_tags": ["staff"]}
DOCUMENT = {**LISTED, "title": "Printer", "content": "It is on fire."}
UNREADABLE = {**LISTED, "code": "too_large", "message": "make it smaller"}


@pytest.mark.parametrize(
    ("kind", "fields", "wrong", "said"),
    [
        (Listed, LISTED, {"external_id": 4711}, "external_id of Listed is int: return text"),
        (Listed, LISTED, {"external_id": None}, "external_id of Listed is None: return text"),
        (Listed, LISTED, {"revision": 1764284400}, "revision of Listed is int: return text, or None"),
        (Document, DOCUMENT, {"revision": 1.5}, "revision of Document is float: return text, or None"),
        (Document, DOCUMENT, {"revision": datetime.now(UTC)}, "revision of Document is datetime: return text, or None"),
        (Listed, LISTED, {"acl_tags": "team:support"}, "acl_tags of Listed is str: return a list of texts"),
        (Listed, LISTED, {"acl_tags": None}, "acl_tags of Listed is None: return a list of texts"),
        (Document, DOCUMENT, {"required_tags": "board"}, "required_tags of Document is str: return a list of texts"),
        (Listed, LISTED, {"acl_tags": {"staff": True}}, "acl_tags of Listed is dict: return a list of texts"),
        (Document, DOCUMENT, {"version": "3"}, "version of Document is str: return a whole number, or None"),
        (Document, DOCUMENT, {"metadata": None}, "metadata of Document is None: return a dictionary"),
        (Unreadable, UNREADABLE, {"message": OSError()}, "message of Unreadable is OSError: return text"),
        (Gone, {}, {"external_id": 4711}, "external_id of Gone is int: return text"),
        (
            Listed,
            LISTED,
            {"read_at": datetime(2026, 11, 28)},  # wrong on purpose
            "read_at of Listed is datetime: return a datetime with a time zone",
        ),
        (Group, {"tag": "staff"}, {"members": "ann@acme.example"}, "members of Group is str: return a list of texts"),
        (Reaction, {}, {"ids": "4711"}, "ids of Reaction is str: return a list of texts"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_its_name(kind: Any, fields: Any, wrong: Any, said: str) -> None:
    """It failed far away, as `TypeError at compare.py:295`, after a check that had found nothing."""
    with pytest.raises(Misconfigured) as refused:
        kind(**fields | wrong)
    assert str(refused.value) == said


def test_other_collections_of_tags_and_kinds_of_text_will_do() -> None:
    class Name(str):
        __slots__ = ()

    tags = {"staff": ["ann"]}.keys()
    assert Listed(external_id=Name("4711"), acl_tags=tags, required_tags=frozenset()).acl_tags == {"staff"}


def test_a_required_tag_that_is_no_text_denies_everybody() -> None:
    """Two of different types cannot be sorted: one such document stopped the whole source."""
    odd: Any = [None, "board"]
    assert access_of(["staff"], odd) == ((), ())
