"""The text that is loaded is as long as people's: five letters a token, chunks of 300 tokens in the mean."""

from __future__ import annotations

import pytest

from bench.prose import WORDS_A_CHUNK, text
from pipeline.core.chunking import chunk
from pipeline.core.model import ChunkParams
from pipeline.embedding.tokens import byte_pairs


def test_generated_text_has_realistic_letters_per_token_and_chunks_per_document() -> None:
    texts = [text(n, 9 * WORDS_A_CHUNK) for n in range(20)]
    count = byte_pairs().count
    assert sum(map(len, texts)) / sum(count(texts)) == pytest.approx(4.9, abs=0.3)
    chunks = [chunk(text, "text/markdown", params=ChunkParams(), count_tokens=count) for text in texts]
    assert sum(map(len, chunks)) / len(texts) == pytest.approx(9, abs=0.5)


def test_generated_documents_are_reproducible_and_unique() -> None:
    assert text(1, 500) == text(1, 500)
    paragraphs = [set(text(n, 500).split("\n\n")) for n in range(50)]
    assert sum(map(len, paragraphs)) == len(set().union(*paragraphs))
