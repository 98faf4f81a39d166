from __future__ import annotations

import pytest
import typer

from cli.search import metadata_conditions


def test_filters_of_a_command_line_are_conditions_by_key() -> None:
    assert metadata_conditions(["labels=a", "labels=b=c", "labels+=d", "labels!=e", "priority>=2", "priority<3.5"]) == {
        "labels": {"any": ["a", "b=c"], "all": ["d"], "none": ["e"]},
        "priority": {"gte": 2, "lt": 3.5},
    }
    assert metadata_conditions(["due>2026-01-31", "due<=2026-02-28"]) == {
        "due": {"gt": "2026-01-31", "lte": "2026-02-28"}
    }


@pytest.mark.parametrize("text", ["labels", "labels=", "=a", "two words=a", "priority>", "priority>=1 priority>=2"])
def test_a_filter_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        metadata_conditions([text] if text.count(">=") < 2 else text.split())
