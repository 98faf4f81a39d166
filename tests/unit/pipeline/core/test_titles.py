"""The chunks that are embedded with a title, and the texts that are embedded for them."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import pytest

from pipeline.core.identity import chunk_ids
from pipeline.core.model import ChunkParams
from pipeline.core.normalise import MESSAGES_TYPE
from pipeline.core.titles import MOST_CHUNKS, EmbeddedChunk, embedded_title, embedding_texts
from tests.support.pipeline.generations import generation

DOCUMENT = UUID(int=7)
WINDOW = 10
GENERATION = generation(input_window=WINDOW, document_prefix="passage: ")


def count_tokens(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def embedded(title: str, text: str, tokens: int) -> str:
    [made], _ = embedding_texts([EmbeddedChunk(title, text, tokens)], GENERATION, count_tokens)
    return made


@pytest.mark.parametrize(
    ("media_type", "chunks", "version", "expected"),
    [
        ("text/plain", 1, 2, "Valves"),
        ("text/plain", MOST_CHUNKS, 2, "Valves"),
        ("text/plain", MOST_CHUNKS + 1, 2, ""),
        (MESSAGES_TYPE, 1, 2, ""),
        ("text/plain", 1, 1, ""),
    ],
)
def test_short_documents_of_new_generations_are_embedded_with_their_title(
    media_type: str, chunks: int, version: int, expected: str
) -> None:
    assert embedded_title("Valves", media_type, chunks, ChunkParams(version=version)) == expected


def test_a_chunk_has_another_id_with_a_title_and_the_same_as_ever_without() -> None:
    plain = chunk_ids(DOCUMENT, ["a", "b", "a"])
    assert [str(id_)[:8] for id_ in plain] == ["17468fea", "56e1bc1c", "81f99ad2"]
    titled, other = (chunk_ids(DOCUMENT, ["a", "b", "a"], title) for title in ("T", "U"))
    assert len({*plain, *titled, *other}) == 9


def test_no_title_and_text_have_the_id_of_another_text() -> None:
    """A line of the text is no title."""
    assert chunk_ids(DOCUMENT, ["a\nb"]) != chunk_ids(DOCUMENT, ["b"], "a")
    assert chunk_ids(DOCUMENT, ["b\nc"], "a") != chunk_ids(DOCUMENT, ["c"], "a\nb")


def test_the_title_is_a_line_in_front_of_the_text() -> None:
    assert embedded("Gate valves", "They close.", 2) == "Gate valves\nThey close."
    assert embedded("", "They close.", 2) == "They close."


def test_a_title_that_does_not_fit_into_the_window_loses_its_last_words() -> None:
    assert embedded("one two three four", "text", WINDOW - 4) == "one two three\ntext"
    assert embedded("one two three four", "text", WINDOW - 1) == "text"
    assert embedded("one two three four", "text", WINDOW) == "text"


def test_a_title_of_thousands_of_words_is_counted_a_dozen_times() -> None:
    """Its author kept the worker from the documents of all tenants for seconds with each document."""
    counted: list[str] = []

    def counting(texts: Sequence[str]) -> list[int]:
        counted.extend(texts)
        return count_tokens(texts)

    words = ["word"] * 2_000
    roomy = generation(input_window=1_000, document_prefix="")
    [made], _ = embedding_texts([EmbeddedChunk(" ".join(words), "text", 100)], roomy, counting)
    assert made == f"{' '.join(words[:900])}\ntext"
    assert len(counted) < 15


def test_each_title_is_counted_once() -> None:
    counted: list[str] = []

    def counting(texts: Sequence[str]) -> list[int]:
        counted.extend(texts)
        return count_tokens(texts)

    chunks = [EmbeddedChunk("one two", f"text {n}", 7 + n % 2) for n in range(6)]
    made, tokens = embedding_texts(chunks, GENERATION, counting)
    assert made == [f"one two\ntext {n}" if n % 2 == 0 else f"one\ntext {n}" for n in range(6)]
    assert tokens == 3 * (2 + 7) + 3 * (1 + 8)
    assert sorted(counted) == ["one\n", "one two\n", "passage: "]
    counted.clear()
    embedding_texts([EmbeddedChunk("", "text", 9)], GENERATION, counting)
    assert counted == []
