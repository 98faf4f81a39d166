"""Each filter narrows both stores: a field that one of them ignores would show more than was asked for."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime
from uuid import UUID

import pytest

from pipeline.core.metadata_keys import Interval, KeyFilter
from query.access.filters import NONE, Filters, clauses, conditions, values

SOME = Filters(
    sources=("wiki",),
    authors=("ann",),
    media_types=("text/*", "application/pdf"),
    since=datetime(2026, 1, 1, tzinfo=UTC),
    before=datetime(2026, 2, 1, tzinfo=UTC),
    documents=(UUID(int=1),),
    keys=(KeyFilter("team", any=("a",)),),
)
KEY = KeyFilter("team", any=("a",), all=(("b",),), none=("c",), within=Interval("d", "e"))


@pytest.mark.parametrize("name", [field.name for field in fields(Filters)])
def test_every_field_is_a_condition_of_both_stores(name: str) -> None:
    assert getattr(SOME, name), "give it a value above"
    without = replace(SOME, **{name: getattr(NONE, name)})
    assert conditions(SOME) != conditions(without), "no SQL condition"
    assert values(SOME) != values(without), "no parameter of the SQL condition"
    assert clauses(SOME) != clauses(without), "no clause for Elasticsearch"


@pytest.mark.parametrize("name", [field.name for field in fields(KeyFilter) if field.name != "name"])
def test_every_condition_on_a_key_is_one_of_both_stores(name: str) -> None:
    assert getattr(KEY, name), "give it a value above"
    some = replace(NONE, keys=(KEY,))
    without = replace(NONE, keys=(replace(KEY, **{name: getattr(KeyFilter("team"), name)}),))
    assert conditions(some) != conditions(without), "no SQL condition"
    assert clauses(some) != clauses(without), "no clause for Elasticsearch"


def test_an_author_is_looked_for_without_hidden_characters() -> None:
    filters = Filters(authors=("A\u200bda",))
    assert values(filters)["authors"] == ["Ada", "A\u200bda"]
    assert clauses(filters) == [{"terms": {"author": ["Ada", "A\u200bda"]}}]
