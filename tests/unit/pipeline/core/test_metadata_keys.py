"""Terms of declared keys: their order is that of the values, whatever the type."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.metadata_keys import MAX_VALUE_CHARACTERS, MAX_VALUES, Interval, KeyType, key_filter, terms, value_of

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
MOMENTS = st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=st.just(UTC))


def term(value: object, kind: KeyType) -> str:
    (only,) = terms({"key": value}, {"key": kind})
    return only


def holds(interval: Interval | None, text: str) -> bool:
    assert interval is not None
    above = interval.low <= text if interval.includes_low else interval.low < text
    below = text <= interval.high if interval.includes_high else text < interval.high
    return above and below


@given(NUMBERS, NUMBERS)
def test_numbers_are_ordered_as_their_terms(a: float, b: float) -> None:
    assert (term(a, "number") < term(b, "number")) == (float(a) < float(b))
    assert value_of(term(a, "number"), "number") == a


@given(MOMENTS, MOMENTS)
def test_times_are_ordered_as_their_terms(a: datetime, b: datetime) -> None:
    assert (term(a.isoformat(), "date") < term(b.isoformat(), "date")) == (a < b)


@given(NUMBERS, NUMBERS, st.sampled_from(["gte", "gt", "lte", "lt"]))
def test_a_bound_holds_exactly_the_numbers_on_its_side(bound: float, value: float, side: str) -> None:
    expected = {"gte": value >= bound, "gt": value > bound, "lte": value <= bound, "lt": value < bound}[side]
    assert holds(key_filter("key", **{side: bound}).within, term(value, "number")) == expected


@given(MOMENTS, MOMENTS, st.sampled_from(["gte", "gt", "lte", "lt"]))
def test_a_bound_holds_exactly_the_times_on_its_side(bound: datetime, value: datetime, side: str) -> None:
    expected = {"gte": value >= bound, "gt": value > bound, "lte": value <= bound, "lt": value < bound}[side]
    within = key_filter("key", **{side: bound.isoformat()}).within
    assert holds(within, term(value.isoformat(), "date")) == expected


def test_bounds_narrow_each_other() -> None:
    within = key_filter("key", gte=1, gt=1, lte=3, lt=5).within
    assert [n for n in (0, 1, 2, 3, 4, 5) if holds(within, term(n, "number"))] == [2, 3]


@pytest.mark.parametrize(
    ("kind", "value", "requested"),
    [
        ("keyword", "pay\u200bments", "payments"),
        ("keyword", "payments", "\u202epayments"),
        ("keyword", "Policy", "Policy"),
        ("keyword", 2026, "2026"),
        ("keyword", True, True),
        ("keyword", "cafe\u0301", "caf\u00e9"),
        ("number", 5, 5.0),
        ("number", 5, "5"),
        ("number", -0.0, 0),
        ("date", "2026-01-31", "2026-01-31T01:00:00+01:00"),
        ("boolean", True, "true"),
        ("boolean", "False", False),
    ],
)
def test_a_value_matches_its_other_spellings(kind: KeyType, value: object, requested: str | float) -> None:
    assert term(value, kind) in key_filter("key", any=[requested]).any


def test_texts_of_another_case_do_not_match() -> None:
    assert term("Policy", "keyword") not in key_filter("key", any=["policy"]).any


def test_true_and_one_are_two_values() -> None:
    assert key_filter("key", any=[True]) != key_filter("key", any=[1])


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("date", "2026-01-31", "2026-01-31"),
        ("date", "2026-01-31T08:30:00+01:00", "2026-01-31T07:30:00Z"),
        ("number", 2.5, 2.5),
        ("boolean", "TRUE", True),
        ("keyword", "a=b", "a=b"),
    ],
)
def test_a_term_is_shown_as_its_value(kind: KeyType, value: object, shown: object) -> None:
    assert value_of(term(value, kind), kind) == shown


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("number", "many"),
        ("number", True),
        ("date", "soon"),
        ("date", "2026-13-01"),
        ("date", 2026),
        ("boolean", "maybe"),
        ("boolean", 1),
        ("keyword", ""),
        ("keyword", "x" * (MAX_VALUE_CHARACTERS + 1)),
        ("keyword", None),
    ],
)
def test_a_value_of_another_type_is_not_indexed(kind: KeyType, value: object) -> None:
    assert terms({"key": value}, {"key": kind}) == []


def test_a_value_of_very_many_marks_keeps_nobody_waiting() -> None:
    """Putting a million of them into order takes a quarter of an hour: then this test never ends."""
    assert terms({"key": "a" + "\u0345\u0334" * 500_000}, {"key": "keyword"}) == []


def test_keys_that_are_not_declared_are_not_indexed() -> None:
    metadata = {"labels": ["b", "a", "b"], "space": "HR"}
    assert terms(metadata, {"labels": "keyword", "other": "keyword"}) == ["labels=a", "labels=b"]


def test_of_very_many_values_the_first_are_indexed() -> None:
    assert len(terms({"labels": [str(n) for n in range(1_000)]}, {"labels": "keyword"})) == MAX_VALUES


def test_bounds_of_two_types_are_refused() -> None:
    with pytest.raises(ValueError, match="a number and a text"):
        key_filter("key", gte=1, lt="2026-01-01")
    with pytest.raises(ValueError, match="empty or longer"):
        key_filter("key", any=["x" * 501])
