"""Standing questions that are refused before they are answered."""

from __future__ import annotations

from typing import Any, cast

import pytest

from query.http.schemas import AnswerRequest
from query.model import BadQuery
from query.settings import RetrievalSettings
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
