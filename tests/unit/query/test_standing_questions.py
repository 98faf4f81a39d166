"""Standing questions that are refused before they are answered, and answers that are made to be large."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from query.http.schemas import AnswerRequest
from query.model import BadQuery
from query.settings import RetrievalSettings
from query.standing.model import MAX_BEHIND, sentences_of
from query.standing.questions import StandingQuestions


class NoPool:
    def connection(self) -> Any:
        raise AssertionError("nothing is asked of Postgres")


async def test_a_question_with_very_long_filters_is_refused() -> None:
    standing = StandingQuestions(
        cast(Any, NoPool()), cast(Any, None), RetrievalSettings(), most=100, ledger_seconds=10.0
    )
    names = [f"{n:03}" + "\N{HAMMER}" * 497 for n in range(100)]
    longest = AnswerRequest.model_validate(
        {"question": "Who?", "filters": {"sources": names, "authors": names, "media_types": names}}
    )

    with pytest.raises(BadQuery, match="filters of this question take"):
        await standing.check_room("acme", "ann", longest.to_question("ann"))


def test_very_many_sentences_from_very_many_passages_are_stored_as_one() -> None:
    """Behind each sentence without a citation are all passages: a list of questions read 700,000 numbers for each."""
    passages = cast(Any, [SimpleNamespace(n=n) for n in range(1, 2_001)])
    answer = cast(Any, SimpleNamespace(text="Yes. " * 9 + "No [2].", unsupported=()))
    assert [len(sentence.cites) for sentence in sentences_of(answer, passages)] == [1] * 10, "those of its paragraph"
    answer.text = "\n\n".join(f"Yes, {n}." for n in range(300))
    [whole] = sentences_of(answer, passages)
    assert whole.text == answer.text
    assert whole.cites == tuple(range(1, 2_001))
    few = sentences_of(answer, passages[:50])
    assert len(few) == 300
    assert sum(len(sentence.cites) for sentence in few) <= MAX_BEHIND
