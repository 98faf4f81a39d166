"""The texts on which the chunker is measured: texts of every kind, made from the files of any Python installation and
from seeds."""

from __future__ import annotations

import glob
import os
import pydoc_data.topics
import random
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pipeline.core.normalise import MESSAGES_TYPE, RECORD_SEPARATOR

LIBRARY_SIZES = (600, 2_000, 6_000, 20_000, 60_000)
"""Sizes of the mixed library's documents in characters, used in turn."""
_HAN = (
    "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后小么心多天而能好都然"
    "没日于起还发成事只作当想看文无开手十用主行方又如前所本见经头面公同三已老从动两长"
)
_ENGLISH, _MARKDOWN, _REST = "text/plain", "text/markdown", "text/x-rst"


class Document(NamedTuple):
    text: str
    media_type: str


_TITLE = re.compile(r"^(\S.*)\n(?:\*{3,}|={3,}|-{3,}|~{3,}|\^{3,}|\"{3,})$", re.MULTILINE)


@cache
def topics() -> str:
    """The Python language's own documentation, about 460 kB of reStructuredText."""
    return "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


def _as_markdown(text: str) -> str:
    """Write titles as headings and examples as code fences, leave out tables, and add further headings, fences, lists
    and tables between the paragraphs."""
    rng = random.Random(1)
    parts = []
    for paragraph in _TITLE.sub(r"## \1", text).split("\n\n"):
        body = textwrap.dedent(paragraph).strip("\n")
        words = body.split()
        kind = rng.random()
        if body.startswith("+-"):
            continue
        if body.startswith(">>>") or "::=" in body:
            kind = 1.0
        if kind < 0.08:
            parts.append("#" * rng.choice([2, 3, 4]) + " " + " ".join(words[:5]))
        if kind > 0.95:
            body = f"```\n{body}\n```"
        elif kind > 0.88:
            body = "\n".join(f"- {line}" for line in textwrap.wrap(" ".join(words).replace("*", ""), 90))
        elif kind > 0.86:
            body = "| name | value |\n| --- | --- |\n" + "\n".join(f"| {word} | {len(word)} |" for word in words[:20])
        parts.append(body)
    return "\n\n".join(parts)


def _prose(text: str) -> str:
    """Return the paragraphs without their indentation, a line each."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n") if len(part.split()) > 6)


def _python() -> str:
    sources = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))[:30]
    return "\n\n".join(Path(path).read_text(encoding="utf-8") for path in sources)


def _rows(words: list[str]) -> str:
    rng = random.Random(8)
    rows = (f"{n},{rng.choice(words)},{' '.join(rng.choices(words, k=12))},{rng.random():.4f}\n" for n in range(3_500))
    return "id,name,note,score\n" + "".join(rows)


def _thread(words: list[str]) -> str:
    rng = random.Random(9)
    lengths = rng.choices([8, 20, 60, 300], [4, 4, 2, 1], k=1_500)

    def sentence() -> str:
        return " ".join(rng.choices(words, k=rng.randint(5, 15))).capitalize() + rng.choice(".?!.\n")

    return f"\n{RECORD_SEPARATOR}".join(" ".join(sentence() for _ in range(n // 8)) for n in lengths)


def _chinese() -> str:
    rng = random.Random(10)
    marks = ["，"] * 6 + ["。"] * 4 + ["、", "；", "？", "。\n\n"]
    return "".join("".join(rng.choices(_HAN, k=rng.randint(4, 14))) + rng.choice(marks) for _ in range(16_000))


@cache
def typed() -> dict[str, list[Document]]:
    """Return one long document of each kind."""
    text = topics()
    words = [word for word in text.split() if word.isalpha()]
    return {
        "prose": [Document(_prose(text), _ENGLISH)],
        "as typed": [Document(text, _ENGLISH)],
        "markdown": [Document(_as_markdown(text), _MARKDOWN)],
        "rst": [Document(text, _REST)],
        "python": [Document(_python(), "text/x-python")],
        "rows": [Document(_rows(words), "text/csv")],
        "messages": [Document(_thread(words), MESSAGES_TYPE)],
        "cjk": [Document(_chinese(), _ENGLISH)],
    }


@cache
def library() -> list[Document]:
    """Return the mixed corpus: equal shares of every kind, as documents of ordinary sizes that begin and end at a
    line."""
    documents = []
    for [whole] in typed().values():
        start = number = 0
        while start < 240_000 and start < len(whole.text):
            size = LIBRARY_SIZES[number % len(LIBRARY_SIZES)]
            end = whole.text.find("\n", start + size) + 1 or len(whole.text)
            documents.append(Document(whole.text[start:end], whole.media_type))
            start, number = end, number + 1
    return documents
