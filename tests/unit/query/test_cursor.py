from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from query.model import BadQuery, Passage, Result
from query.retrieval.cursor import MAX_CHARACTERS, MAX_PAGED, read, search_digest

SEARCH = search_digest(["acme", "sluice"])


def result(*chunks: UUID) -> Result:
    passage = Passage(chunks[0], uuid4(), "a.md", "wiki", "", None, 0)
    return Result(passage, "", 1.0, {}, chunks)


def test_a_cursor_knows_what_earlier_pages_returned() -> None:
    pages = [[uuid4() for _ in range(3)] for _ in range(2)]
    cursor = read(None, SEARCH)
    for page in pages:
        cursor = read(str(cursor.after([result(*page)])), SEARCH)
    assert all(cursor.shows(chunk) for page in pages for chunk in page)
    assert not cursor.shows(uuid4())
    assert cursor.results == 2


def test_a_cursor_of_another_search_is_refused() -> None:
    cursor = str(read(None, SEARCH).after([result(uuid4())]))
    with pytest.raises(BadQuery, match="another search"):
        read(cursor, search_digest(["acme", "weir"]))


@pytest.mark.parametrize("text", ["", "x", "ä", "AAAA", "%%%%", "A" * 13, "A" * (MAX_CHARACTERS + 1)])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(BadQuery, match="begin again without it"):
        read(text, SEARCH)


def test_the_longest_cursor_is_accepted() -> None:
    cursor = read(None, SEARCH).after([result(*(uuid4() for _ in range(4))) for _ in range(MAX_PAGED)])
    assert len(str(cursor)) <= MAX_CHARACTERS
    assert read(str(cursor), SEARCH) == cursor
