"""Makes texts to load: sentences of the Python language reference, drawn by a seed and grouped into paragraphs.

The made-up words of ``bench.load_corpus`` cost a tokenizer one token for two letters, English costs one for five:
chunks of 400 tokens would be less than half as long as people's are, and as dear to copy, to store and to search.
"""

from __future__ import annotations

import random
import re
from functools import cache

from bench.chunking_corpus import topics

FEWEST_WORDS, MOST_WORDS = 5, 60
"""Length of a sentence that is used: shorter and longer ones are headings, grammar and tables."""
SENTENCES_A_PARAGRAPH = 6
PARAGRAPHS_A_HEADING = 8
WORDS_A_CHUNK = 195
"""Words of a chunk with a target of 400 tokens: 300 on average, five letters each
(``tests/unit/bench/test_prose.py``)."""


@cache
def sentences() -> tuple[str, ...]:
    flat = (" ".join(paragraph.split()) for paragraph in topics().split("\n\n"))
    candidates = (
        sentence for paragraph in flat for sentence in re.findall(r"[A-Z][^.!?]*[a-z)][.!?](?= |$)", paragraph)
    )
    return tuple(dict.fromkeys(s for s in candidates if FEWEST_WORDS <= len(s.split()) <= MOST_WORDS))


def text(number: int, words: int) -> str:
    """Return a Markdown document of about that many words. Each number has its own document, always the same."""
    dice = random.Random(number)
    parts, written = [f"# Report {number}"], 0
    while written < words:
        paragraph = dice.sample(sentences(), SENTENCES_A_PARAGRAPH)
        if len(parts) % PARAGRAPHS_A_HEADING == 0:
            parts.append(f"## {' '.join(paragraph[0].split()[:4])}")
        parts.append(" ".join(paragraph))
        written += sum(len(sentence.split()) for sentence in paragraph)
    return "\n\n".join(parts) + "\n"
