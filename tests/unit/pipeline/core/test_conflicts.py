"""Contradictions, duplicates and outdated copies are distinguished, in several languages."""

from __future__ import annotations

from datetime import UTC, datetime
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.conflicts import Comparison, Passage, are_siblings, compare, examine, passage

OLD, NEW = datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
AROUND = "Requests for a key take two days. Keys are rotated weekly by the security team."


def compared(a: str, b: str, titles: tuple[str, str] = ("Handbook", "Wiki")) -> Comparison | None:
    return compare(passage(a, "a", titles[0], (), OLD), passage(b, "b", titles[1], (), NEW))


@pytest.mark.parametrize(
    ("kind", "a", "b", "places"),
    [
        ("number", "The retention period is 30 days.", "The retention period is 90 days.", ("30 days", "90 days")),
        ("number", "The price is $20 per seat.", "The price is $25 per seat.", ("$20", "$25")),
        ("unit", "The retention period is 30 days.", "The retention period is 30 hours.", ("30 days", "30 hours")),
        ("unit", "The cache holds 64 kB.", "The cache holds 64 MB.", ("64 kB", "64 MB")),
        (
            "version",
            "The service requires Python 3.11 or later.",
            "The service requires Python 3.9 or later.",
            ("3.11", "3.9"),
        ),
        (
            "date",
            "The office closes on 24 December 2025.",
            "The office closes on 2025-12-23.",
            ("24 December 2025", "2025-12-23"),
        ),
        (
            "negation",
            "Nightly backups are encrypted at rest.",
            "Nightly backups aren't encrypted at rest.",
            ("Nightly backups are encrypted at rest.", "aren't"),
        ),
        (
            "negation",
            "Deploying to production is allowed.",
            "Deploying to production is forbidden.",
            ("Deploying to production is allowed.", "forbidden"),
        ),
        (
            "name",
            f"Ask Maria Schmidt for access to the vault. {AROUND}",
            f"Ask Peter Novak for access to the vault. {AROUND}",
            ("Maria Schmidt", "Peter Novak"),
        ),
        ("number", "Die Aufbewahrungsfrist beträgt 30 Tage.", "Die Aufbewahrungsfrist beträgt 90 Tage.", None),
        (
            "negation",
            "Das Backup wird verschlüsselt gespeichert.",
            "Das Backup wird nicht verschlüsselt gespeichert.",
            None,
        ),
        ("negation", "La clé privée est partagée.", "La clé privée n'est pas partagée.", None),
        ("number", "Срок хранения данных составляет 30 дней.", "Срок хранения данных составляет 90 дней.", None),
        ("number", "超时时间为30秒。", "超时时间为60秒。", None),
    ],
)
def test_a_statement_that_differs_is_a_contradiction(kind: str, a: str, b: str, places: tuple[str, str] | None) -> None:
    result = compared(a, b)
    assert result is not None
    assert (result.kind, result.older) == (kind, "a")
    [pair] = result.pairs
    if places is not None:
        assert (a[slice(*pair.a)], b[slice(*pair.b)]) == places


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("The timeout is 1 minute.", "The timeout is 60 seconds."),
        ("The office closes on 24 December 2025.", "The office closes on December 24, 2025."),
        ("It takes three working days.", "It takes 3 working days."),
        ("Old keys cannot be used again.", "Old keys can't be used again."),
        ("The *old* keys are `revoked` at once.", "The old keys are revoked, at once."),
        ("The limit is 1,000 open files.", "The limit is 1000 open files."),
        ("The option is disabled by default.", "The option is not enabled by default."),
        ("Old keys are revoked at once. The log says so.", "The log says so. Old keys are revoked at once."),
    ],
)
def test_the_same_in_another_form_is_no_contradiction(a: str, b: str) -> None:
    result = compared(a, b)
    assert result is None or result.kind == "duplicate"


@pytest.mark.parametrize("separated", ["\n", "\n\n"])
def test_a_heading_is_no_part_of_the_sentence_below_it(separated: str) -> None:
    a, b = (
        f"# {title}{separated}Backups of the billing database are kept for {days} days. Restores are rehearsed."
        for title, days in (("Backups", 14), ("Retention of billing data\n## Database", 90))
    )
    result = compared(a, b)
    assert result is not None
    [pair] = result.pairs
    assert (result.kind, a[slice(*pair.a)], b[slice(*pair.b)]) == ("number", "14 days", "90 days")


def test_equal_passages_are_duplicates_whatever_their_markup() -> None:
    result = compared("# Keys\n\nOld *keys* are revoked.", "Keys\nOld keys are  revoked.")
    assert result is not None
    assert (result.kind, result.pairs) == ("duplicate", ())


def test_a_copy_with_a_replaced_statement_is_outdated() -> None:
    a = f"The vault opens at nine. Ask the desk for a badge. {AROUND}"
    b = f"The vault opens at nine. Access cards come by mail since the move. {AROUND}"
    result = compared(a, b)
    assert result is not None
    assert (result.kind, result.older) == ("outdated", "a")
    assert [a[slice(*pair.a)] for pair in result.pairs] == ["Ask the desk for a badge."]


def test_without_their_times_nothing_is_outdated() -> None:
    a, b = (
        passage(f"The vault opens at nine. {replaced} {AROUND}", replaced)
        for replaced in ("Ask the desk for a badge.", "Access cards come by mail since the move.")
    )
    assert compare(a, b) is None


def test_similar_things_differ_without_a_contradiction() -> None:
    a = "The release requires Python 3.9 on all servers."
    b = "The release requires Python 3.11 on all servers."
    assert compared(a, b, ("Notes of release 1.4", "Notes of release 1.5")) is None
    assert compared(a, b, ("Notes", "Notes")) is not None


def test_titles_that_differ_in_one_word_are_siblings() -> None:
    assert are_siblings("ipaddress.v4_int_to_packed", "ipaddress.v6_int_to_packed")
    assert not are_siblings("Deploying the service", "Deploying the service (copy)")
    assert not are_siblings("page-12.md", "page-2012.md")


def test_items_of_a_list_do_not_contradict_each_other() -> None:
    ports = "Port 8080 serves the admin interface. Port 8081 serves the admin interface. "
    assert compared(ports, "Port 9090 serves the admin interface.") is None


def test_different_values_in_several_neighbours_are_a_list() -> None:
    new = passage("Changed behaviour applies since version 3.7.", "new")
    neighbours = [passage(f"Changed behaviour applies since version 3.{n}.", f"{n}") for n in (8, 9)]
    assert examine(new, neighbours[:1])[0] is not None
    assert examine(new, neighbours) == [None, None]


def test_a_document_that_has_both_statements_contradicts_nobody() -> None:
    new = passage("A builtin class sets the flag of 16 bytes.", "new")
    both = [passage(f"A builtin class sets the flag of {n} bytes.", "other") for n in (16, 32)]
    assert [result.kind if result else None for result in examine(new, both)] == ["duplicate", None]


def test_parts_of_one_document_need_more_in_common() -> None:
    a, b = (passage(f"Outputs the number in base {n}.", "same") for n in (2, 8))
    assert compare(a, b) is None


def test_code_and_questions_state_nothing() -> None:
    assert compared(">>> retry(limit=3, wait=5)", ">>> retry(limit=4, wait=5)") is None
    assert compared("How long is the retention of 30 days?", "How long is the retention of 90 days?") is None


FORMS = (
    ("keys", "key", "KEYS", "key’s"),
    ("disabled", "enabled", "Enabled"),
    ("forbidden", "allowed", "verboten", "erlaubt"),
    ("ΟΔΟΣ", "οδος", "Οδος"),
    ("ΟΔΟΣ:ΝΕΑ", "οδος νεα"),
    ("l’eau", "eau", "L'eau"),
    ("don’t", "not", "never", "must"),
    ("30", "ninety", "90 days"),
    ("vault.open", "VAULT.open"),
    ("密码", "密码不"),
)
"""Words of which all forms are, or may be, the same word of a key."""


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(FORMS), st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=8))
def test_a_passage_that_is_not_read_shares_no_statement(words: list[tuple[tuple[str, ...], int, int]]) -> None:
    a = passage(" ".join(forms[n % len(forms)] for forms, n, _ in words) + ".", "a")
    b = passage(" ".join(forms[n % len(forms)] for forms, _, n in reversed(words)) + ".", "b")
    if {statement.key for statement in a.statements} & {statement.key for statement in b.statements}:
        assert a.may_share_words(b)


@settings(max_examples=50)
@given(st.text(max_size=300), st.text(max_size=300))
def test_any_text_can_be_compared_and_the_spans_are_in_it(a: str, b: str) -> None:
    result = compared(a, b)
    for pair in result.pairs if result else ():
        assert 0 <= pair.a[0] < pair.a[1] <= len(a)
        assert 0 <= pair.b[0] < pair.b[1] <= len(b)


@pytest.mark.parametrize(
    "text", ["a" * 1_000_000, "1." * 500_000, "not " * 250_000, "- 1\n" * 250_000, "\n \n" * 300_000, "*_" * 500_000]
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    def seconds(size: int) -> float:
        started = process_time()
        read: list[Passage] = [passage(text[:size], f"{n}") for n in range(2)]
        compare(*read)
        return process_time() - started

    seconds(1_000)
    assert seconds(len(text)) < 100 * max(seconds(len(text) // 8), 0.01)
