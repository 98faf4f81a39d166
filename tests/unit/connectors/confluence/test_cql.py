"""The fake's query language: what it takes, what it refuses, and how it reads times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from connectors.fakes.confluence_cql import CqlError, Index, search
from connectors.fakes.confluence_state import Item, State


@pytest.fixture
def state() -> State:
    state = State()
    state.freeze(datetime(2026, 11, 21, 12, 0, 30, tzinfo=UTC))
    state.add_user("ann")
    for key in ("ENG", "OPS"):
        state.add_space(key)
    return state


def search_index(state: State, cql: str, *, zone: str = "UTC", delay: timedelta = timedelta()) -> list[Item]:
    return search(cql, Index(state, delay, ZoneInfo(zone)))


def test_cql_fields_operators_and_precedence(state: State) -> None:
    top = state.add_page("ENG", "Top")
    below = state.add_page("ENG", "Below", parent=top.id)
    post = state.add_page("OPS", "Post", kind="blogpost")
    said = state.add_comment(below.id, "x")
    file = state.attach(below.id, "a.txt", b"", "text/plain")
    for cql, expected in {
        "type = page": [top, below],
        "TYPE in (page, blogpost) AND space = OPS": [post],
        'space = "ENG" and (type = comment or type = attachment)': [said, file],
        "space = OPS or space = ENG and type = comment": [post, said],
        "not type = page and type != comment": [post, file],
        "type not in (page, comment)": [post, file],
        f'id in ("{top.id}", "{file.id}")': [top, file],
        f"ancestor = {top.id}": [below],
        f"container in ({below.id})": [said, file],
        f"parent = {top.id} order by created desc": [below],
        "": [top, below, post, said, file],
    }.items():
        assert search_index(state, cql) == expected, cql


@pytest.mark.parametrize(
    "cql",
    [
        "type",
        "type =",
        "type = page and",
        "type = page)",
        "nothing = 1",
        "lastmodified > soon",
        'type ~ "p"',
        'lastmodified > now("-1y2")',
        "type in ()",
        "(type = page",
        "type = page order by title",
        "type = 'page",
        "lastmodified in (now())",
    ],
)
def test_invalid_cql_is_refused(state: State, cql: str) -> None:
    state.add_page("ENG", "Top")
    with pytest.raises(CqlError):
        search_index(state, cql)


def test_cql_times_are_compared_by_the_minute(state: State) -> None:
    page = state.add_page("ENG", "Top")  # at 12:00:30
    assert search_index(state, 'lastmodified >= "2026/11/21 12:00"') == [page]
    assert search_index(state, 'lastmodified > "2026-11-21 12:00"') == []
    state.advance(minutes=5, seconds=20)  # 12:05:50
    assert search_index(state, 'lastmodified >= now("-5m")') == [page]
    assert search_index(state, 'lastmodified >= now("-4m")') == []


def test_cql_times_are_in_the_time_zone_of_the_requesting_user(state: State) -> None:
    page = state.add_page("ENG", "Top")
    assert search_index(state, 'lastmodified >= "2026/11/21 21:00"', zone="Asia/Tokyo") == [page]
    assert search_index(state, 'lastmodified >= "2026/11/21 21:01"', zone="Asia/Tokyo") == []
    assert search_index(state, 'lastmodified >= now("-1m")', zone="Asia/Tokyo") == [page]


def test_the_search_index_shows_changes_after_its_delay(state: State) -> None:
    page = state.add_page("ENG", "Top")
    delay = timedelta(minutes=3)
    assert search_index(state, "type = page", delay=delay) == []
    state.advance(minutes=3)
    assert search_index(state, "type = page", delay=delay) == [page]
    state.edit(page.id, body="x")
    assert search_index(state, 'lastmodified >= now("-1m")', delay=delay) == []  # it knows the version before
    assert search_index(state, 'lastmodified >= now("-1m")') == [page]
