"""What a query's words are worth in Elasticsearch: the scoring clauses of a bool query. Pure."""

from __future__ import annotations

from typing import Any

TITLE_BOOST, HEADINGS_BOOST, EXACT_BOOST = 2.0, 1.5, 0.5
MOST_WORDS = 150
"""Words of a query that are looked up; the rest of a pasted page adds clauses and no meaning."""


def clauses(words: str) -> dict[str, Any]:
    """``must`` and ``should`` of a bool query, to stand beside its filters.

    Words count where they stand (text, title, headings, one field as far as BM25 is concerned: BM25F); unstemmed words
    count again, so that an identifier or an inflected form beats its mere stem.
    """
    looked_up = " ".join(words.split()[:MOST_WORDS])
    return {
        "must": {
            "combined_fields": {
                "query": looked_up,
                "fields": ["text", f"title^{TITLE_BOOST}", f"headings^{HEADINGS_BOOST}"],
            }
        },
        "should": {"match": {"text.exact": {"query": looked_up, "boost": EXACT_BOOST}}},
    }
