"""A question that asks for what is new, or names a time, is recognised; ordinary ones are not."""

from __future__ import annotations

from datetime import date, datetime

import pytest

from bench.confidence import EVERYDAY
from query.modes import recency as module
from query.modes.recency import recency
from tests.support.query.questions import QUESTIONS

TODAY = date(2026, 11, 28)  # a Saturday


@pytest.mark.parametrize(
    ("question", "phrase", "since", "before"),
    [
        ("what did we decide this week?", "this week", "2026-11-23", "2026-11-30"),
        ("What was said yesterday about the harbour?", "yesterday", "2026-11-27", "2026-11-28"),
        ("outages last month", "last month", "2026-10-01", "2026-11-01"),
        ("outages in the last 3 days", "in the last 3 days", "2026-11-25", "2026-11-29"),
        ("minutes of 3 November 2026", "3 November 2026", "2026-11-03", "2026-11-04"),
        ("minutes of November 3rd, 2026", "November 3rd, 2026", "2026-11-03", "2026-11-04"),
        ("what changed in October 2026", "October 2026", "2026-10-01", "2026-11-01"),
        ("what is in the plan since 5 May", "5 May", "2026-05-05", "2026-11-29"),
        ("news from 2026-11-02", "2026-11-02", "2026-11-02", "2026-11-03"),
        ("Was wurde letzte Woche beschlossen?", "letzte Woche", "2026-11-16", "2026-11-23"),
        ("Protokoll vom 3. November 2026", "3. November 2026", "2026-11-03", "2026-11-04"),
        ("Was ist am 3.11.2026 passiert?", "3.11.2026", "2026-11-03", "2026-11-04"),
        ("compte rendu du 3 novembre 2026", "3 novembre 2026", "2026-11-03", "2026-11-04"),
        ("¿Qué se decidió en noviembre de 2026?", "noviembre de 2026", "2026-11-01", "2026-12-01"),
        ("Что решили вчера?", "вчера", "2026-11-27", "2026-11-28"),
    ],
)
def test_a_named_time_becomes_a_period(question: str, phrase: str, since: str, before: str) -> None:
    asks = recency(question, TODAY)
    assert asks is not None
    bounds = [datetime.fromisoformat(f"{day}T00:00:00+00:00") for day in (since, before)]
    assert (asks.phrase, [asks.since, asks.before]) == (phrase, bounds)
    assert phrase not in asks.topic


@pytest.mark.parametrize(
    "question",
    ["the latest release notes of the pump", "most recent minutes of the pump", "Was ist die neueste Regel der Pumpe?"],
)
def test_what_is_new_has_no_period(question: str) -> None:
    asks = recency(question, TODAY)
    assert asks is not None
    assert (asks.since, asks.before) == (None, None)
    assert "pump" in asks.topic.lower()


@pytest.mark.parametrize(
    "question",
    [
        "settings of Windows Server 2019",
        "Office version 2024",
        "Server Error 2024",
        "step 3 may fail",
        "do we need 10 Users?",
        "What are the plans for March 2027?",  # documents of the future do not exist yet
        "what is on 31 February 2026",
        "release 2.11.2026",
        "the last element of a list",
    ],
)
def test_other_numbers_and_words_name_no_time(question: str) -> None:
    assert recency(question, TODAY) is None


def test_ordinary_questions_ask_for_nothing_new() -> None:
    questions = [question for question, _ in QUESTIONS] + [text for text in EVERYDAY if "yesterday" not in text]
    assert [question for question in questions if recency(question, TODAY)] == []


def test_of_a_question_full_of_what_may_be_dates_the_first_ten_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes a millisecond for each, of which a question of 8,000 characters had a thousand."""
    looked_at = []
    monkeypatch.setattr(module, "_parsed", lambda text, *_: looked_at.append(text))
    assert recency(" ".join(f"{n} abcd" for n in range(1, 99)), TODAY) is None
    assert looked_at == [f"{n} abcd" for n in range(1, 11)]
