"""What a query's words are worth in Elasticsearch: the scoring clauses of a bool query. Pure.

Each number was measured on two collections: docs/evaluation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TITLE_BOOST, HEADINGS_BOOST, PHRASE_BOOST = 4.0, 1.5, 1.0
PHRASE_SLOP = 50
"""Words that may stand between the query's, or how far they may have changed places: near each other, in any order."""
MOST_WORDS = 150
"""Words of a query that are looked up; the rest of a pasted page adds clauses and no meaning …"""
MOST_CHARACTERS = 1_500
"""… and so many characters, where words are not set apart: of Chinese or Japanese each is a term, and 8,000 of them in
a phrase with slop took 1.8 s of 1,500 entries."""


def clauses(words: str, more: Mapping[str, float] | None = None) -> dict[str, Any]:
    """A bool query's clauses, to stand beside its filters.

    Words count where they stand (text, title, headings, one field as far as BM25 is concerned: BM25F), and once more,
    unstemmed, where all of them stand near each other. more: words that are asked for besides, and their worth.
    """
    looked_up = " ".join(words.split()[:MOST_WORDS])[:MOST_CHARACTERS]
    own = {
        "must": {
            "combined_fields": {
                "query": looked_up,
                "fields": ["text", f"title^{TITLE_BOOST}", f"headings^{HEADINGS_BOOST}"],
            }
        },
        "should": {"match_phrase": {"text.exact": {"query": looked_up, "slop": PHRASE_SLOP, "boost": PHRASE_BOOST}}},
    }
    if not more:
        return own
    besides = [{"match": {"text": {"query": word, "boost": worth}}} for word, worth in more.items()]
    return {"should": [{"bool": own}, *besides], "minimum_should_match": 1}
