"""Titles in front of what is embedded: a short passage often does not say what its document is about. Pure.

The title is no part of the quoted text. Only the chunks of short documents have it, so that a new title costs few
embeddings, and it is part of their ids, so that a chunk with another title is another chunk
(docs/adr/0093-titles-in-embeddings.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.core.model import ChunkParams, CountTokens, Generation
from pipeline.core.normalise import MESSAGES_TYPE

SINCE_VERSION = 2
"""The first version of ``ChunkParams`` whose generations embed titles."""
MOST_CHUNKS = 3
"""The most chunks of a document that are embedded with its title: what a new title costs at most."""


@dataclass(frozen=True, slots=True)
class EmbeddedChunk:
    """The text of a chunk, and the title that it is embedded with."""

    title: str
    """Empty: the chunk is embedded without a title."""
    text: str
    tokens: int
    """The tokens of ``text``."""


class EmbeddedTexts(NamedTuple):
    texts: list[str]
    tokens: int
    """The tokens of all texts together."""


def has_titles(params: ChunkParams) -> bool:
    """Whether generations of these parameters embed titles at all."""
    return params.version >= SINCE_VERSION


def embedded_title(title: str, media_type: str, chunks: int, params: ChunkParams) -> str:
    """The title that the chunks of a document are embedded with; empty: they are embedded without one. chunks: how many
    the document has.

    Messages have none: their title is the beginning of a conversation, and often a greeting
    (docs/adr/0082-context-in-embeddings.md).
    """
    return title if has_titles(params) and chunks <= MOST_CHUNKS and media_type != MESSAGES_TYPE else ""


def embedding_texts(
    chunks: Sequence[EmbeddedChunk], generation: Generation, count_tokens: CountTokens
) -> EmbeddedTexts:
    """The texts to embed for these chunks, without the model's own prefix. A title that does not fit into the model's
    window together with its chunk loses its last words. count_tokens: the generation's."""
    headers = list(dict.fromkeys(_header(chunk.title) for chunk in chunks if chunk.title))
    prefix, *counted = count_tokens([generation.document_prefix, *headers]) if headers else [0]
    counts = {"": 0, **dict(zip(headers, counted, strict=True))}
    texts: list[str] = []
    tokens = 0
    for chunk in chunks:
        header = _fitting(chunk.title, generation.input_window - prefix - chunk.tokens, counts, count_tokens)
        texts.append(header + chunk.text)
        tokens += counts[header] + chunk.tokens
    return EmbeddedTexts(texts, tokens)


def title_tokens(title: str, count_tokens: CountTokens) -> int:
    """The tokens that an ``embedded_title`` adds to each chunk."""
    return count_tokens([_header(title)])[0] if title else 0


def _header(title: str) -> str:
    return f"{title}\n" if title else ""


def _fitting(title: str, room: int, counts: dict[str, int], count_tokens: CountTokens) -> str:
    """The line with this title, without its last words where it has more tokens than there is room for. counts: those
    of lines that were counted before, to which it adds. A title of thousands of words is counted a dozen times."""
    whole = _header(title)
    if counts[whole] <= room:
        return whole
    words = title.split(" ")
    fitting, too_many = 0, len(words)
    while too_many - fitting > 1:
        number = (fitting + too_many) // 2
        header = _beginning(words, number)
        if header not in counts:
            [counts[header]] = count_tokens([header])
        if counts[header] <= room:
            fitting = number
        else:
            too_many = number
    return _beginning(words, fitting)


def _beginning(words: Sequence[str], number: int) -> str:
    return _header(" ".join(words[:number]).rstrip())
