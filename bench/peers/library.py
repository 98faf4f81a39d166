"""The documents of one run, the changes to them, and the check of a store's rows.

The check compares the rows in Postgres with the folder, without using the peer.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.load_corpus import Corpus

WORDS = 900
"""Words of a document: 2,200 tokens of cl100k, and about nine chunks of 400 with the paragraphs as they are."""
LONG_WORDS = 48_000
"""Words of the long document: about 500 chunks."""
SHARE = 100
"""One document in so many is changed at a time; those with the same remainder share a folder."""
NEW_TEXTS = 10_000_000
"""First number of texts of the corpus that the first load does not use."""
READERS, FEWER_READERS = "staff", "board"
TOP = "A paragraph that was not there before.\n\n"
NEW_PARAGRAPH = "Of this paragraph nothing is left: the one of {name} now tells of the lock keeper."


@dataclass(frozen=True)
class Row:
    source: str
    text: str
    access: str
    embedded: bool = True


class Library:
    """Folders of text files, and access.json next to them with their access. A name is a path: ``04/00104.md``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "library"
        self.folder.mkdir(parents=True)
        self.access: dict[str, str] = {}
        self._corpus = Corpus()
        self._edits = 0

    def fill(self, documents: int) -> None:
        for n in range(documents):
            self._write(f"{n % SHARE:02}/{n:05}.md", self._corpus.text(n, WORDS))
        self._publish()

    def some(self, turn: int) -> list[str]:
        """Return one in SHARE of the short documents; each turn has others."""
        return sorted(name for name in self.access if name.startswith(f"{turn:02}/"))

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()

    def edit_word(self, names: Iterable[str]) -> None:
        """Change one word in the middle, each time to another."""
        self._edits += 1
        for name in names:
            words = self.text(name).split(" ")
            words[len(words) // 2] = f"spillway{self._edits}"
            self._write(name, " ".join(words))

    def edit_paragraph(self, names: Iterable[str]) -> None:
        """Replace a paragraph in the middle by one of a single sentence."""
        for name in names:
            paragraphs = self.text(name).split("\n\n")
            middle = len(paragraphs) // 2 | 1  # paragraphs stand at odd places, headings at even ones
            paragraphs[middle] = NEW_PARAGRAPH.format(name=name)
            self._write(name, "\n\n".join(paragraphs))

    def add_long(self) -> None:
        self._write("long.md", self._corpus.text(NEW_TEXTS, LONG_WORDS))
        self._publish()

    def insert_at_top(self) -> None:
        self._write("long.md", TOP + self.text("long.md"))

    def add_twins(self) -> tuple[str, str]:
        """Add two pairs of equal files. Returns the first of one pair and the second of the other."""
        for pair in ("1", "2"):
            text = self._corpus.text(NEW_TEXTS + int(pair), WORDS)
            for copy in ("a", "b"):
                self._write(f"twin-{pair}{copy}.md", text)
        self._publish()
        return "twin-1a.md", "twin-2b.md"

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink()
            del self.access[name]
        self._publish()

    def restrict(self, names: Iterable[str]) -> None:
        for name in names:
            self.access[name] = FEWER_READERS
        self._publish()

    def _write(self, name: str, text: str) -> None:
        self.access.setdefault(name, READERS)
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def _publish(self) -> None:
        """Replace access.json atomically, for a peer that watches it."""
        target = self.folder.with_name("access.json")
        draft = target.with_suffix(".draft")
        draft.write_text(json.dumps(self.access))
        draft.replace(target)

    def faults(self, rows: Sequence[Row]) -> dict[str, str]:
        """Return by document what is wrong with its rows; empty if the store is right."""
        by_document: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_document[row.source].append(row)
        wrong = dict.fromkeys(by_document.keys() - self.access.keys(), "is gone but has rows")
        for name, access in self.access.items():
            if (fault := _fault(self.text(name), access, by_document[name])) is not None:
                wrong[name] = fault
        return wrong


def _fault(text: str, access: str, rows: Sequence[Row]) -> str | None:
    """Return what is wrong with a document's rows, or None. Only words are compared: splitters may change whitespace
    and headings' marks."""
    words = text.replace("#", " ").split()
    line = " ".join(words)
    covered = bytearray(len(line))
    for row in rows:
        chunk = " ".join(row.text.replace("#", " ").split())
        at = line.find(chunk)
        if at < 0:
            return "has a row of another text"
        covered[at : at + len(chunk)] = b"\1" * len(chunk)
        if not row.embedded:
            return "has a row without a vector"
        if row.access != access:
            return "has a row with other readers"
    missing = sum(not mark for mark, letter in zip(covered, line, strict=True) if letter != " ")
    return f"lacks {missing} letters of {len(line)}" if missing > 0 else None
