"""Measures how many planted contradictions are detected, and how often text without any is reported.

    python -m bench.conflicts [--json FILE]      # three minutes → bench/results/conflicts.json

Edits are planted in the documentation that Python brings (bench/python_docs.py), in the half of its documents that no
rule was tried on: a seeded program changes a number, version, date, unit, name or negation of a sentence, or, as a
negative, says the same in other words, another order, another form or other markup. An edited passage is a copy of a
whole chunk, or an excerpt of the sentence with its neighbours; its nearest neighbours among all chunks, by the bundled
model, are what it is compared with. It counts as detected if the changed sentence is reported; every other report is a
false alarm. The program shares no code with what it measures. Dates and most units are planted in sentences that it
adds to the documentation first, which has hardly any.

False alarms in unmodified text are counted in the same documentation, and in that of the library's other modules, which
nobody looked at. ``python -m bench.judged`` writes the tables of docs/conflicts.md.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from bench.machine import moment
from bench.python_docs import MODULES, collection, documented_members
from pipeline.core.chunking import chunk
from pipeline.core.conflicts import Comparison, Passage, examine, passage
from pipeline.core.model import ChunkParams
from pipeline.core.normalise import normalise
from pipeline.embedding.choose import embedder
from pipeline.embedding.port import Embedder
from pipeline.runtime.settings import EmbeddingSettings, dist

RESULTS = Path(__file__).parent / "results" / "conflicts.json"
SEED = 20261128
EDITS = 2_000
POSITIVE_SHARE = 0.6
NEIGHBOURS = 6
BATCH = 64
PARAMS = ChunkParams(200, 80, 254)
WRITTEN = datetime(2026, 1, 1, tzinfo=UTC)
GENERATED = (
    "This part of {topic} was last reviewed by its authors on {date}.",
    "A reader of {topic} reported a mistake in this section on {date}.",
    "The examples of {topic} were run again on {date}.",
    "Questions about {topic} are answered within {amount} {unit}.",
    "Drafts of {topic} are kept for {amount} {unit} and then deleted.",
    "Checking every example of {topic} takes {amount} {unit} on a small machine.",
)
"""Sentences that are added to passages of the documentation, at most once to each document."""


class Piece(NamedTuple):
    """A chunk of the documentation."""

    document: str
    headings: tuple[str, ...]
    text: str


class Edit(NamedTuple):
    kind: str
    form: str
    """``copy`` or ``excerpt``."""
    document: str
    text: str
    changed: tuple[int, int]
    """Where the edited sentence is in the text."""


# Edits


_SENTENCE = re.compile(r"(?<=[.\n]\s)[A-Z][^\n]*?(?:\n[^\n]+?)*?\.(?=\s|$)")
_CODE = re.compile(r">>>|::=|[{}=<>]|\(\)|__\w+__\(")
_NUMBER = re.compile(r"(?<![\w.\-])\d{1,4}(?![\w.\-]|,\d)")
_VERSION = re.compile(r"(?<=ersion )\d\.\d+(?:\.\d+)?|(?<=ython )\d\.\d+(?:\.\d+)?")
_YEAR_OR_DATE = re.compile(
    r"\b(?:19|20)\d\d-\d\d-\d\d\b|\b(?:January|February|March|April|May|June|July|August|September|October|November"
    r"|December) \d{1,2}(?:, \d{4})?\b"
)
_QUANTITY = re.compile(
    r"\b(\d+|one|two|three|four|five|ten) (bytes?|seconds?|bits?|characters?|days?|hours?|minutes?)\b"
)
_OTHER_UNITS = {
    "byte": "kilobyte",
    "second": "minute",
    "bit": "byte",
    "character": "byte",
    "day": "hour",
    "hour": "day",
}
_IDENTIFIER = re.compile(r"(?<=[\"‘“*`])[A-Za-z]+(?:[_.][A-Za-z]+)+(?=[\"’”*`(])|\b[A-Z][a-z]+[A-Z]\w+\b")
_AUXILIARY = re.compile(r"\b(?:is|are|can|must|may|will|should|was|has been)\b(?! (?:not|no|never|only)\b)")
_NEGATED = re.compile(r"\b(is|are|can|must|may|will|should|does|do) not\b(?! only)")
SYNONYMS = {
    "usually": "normally",
    "creates": "makes",
    "contains": "includes",
    "raised": "signalled",
    "such as": "for instance",
    "specified": "stated",
    "specify": "state",
    "whether": "if",
    "however": "though",
    "allows": "lets",
    "because": "since",
    "example": "instance",
    "begins": "starts",
    "called": "invoked",
    "default": "standard",
    "additional": "further",
    "the same": "an identical",
    "must be": "has to be",
    "determine": "find out",
    "provides": "offers",
    "first": "initial",
    "error": "failure",
    "value": "result",
    "optional": "not required",
}
SAME_IN_OTHER_FORM = {
    "is not": "isn't",
    "are not": "aren't",
    "cannot": "can't",
    "do not": "don't",
    "does not": "doesn't",
    "will not": "won't",
    "two": "2",
    "three": "3",
    "four": "4",
    "1 ": "1.0 ",
    "1000": "1,000",
    "not valid": "invalid",
    "invalid": "not valid",
    "not supported": "unsupported",
}
Change = Callable[[str, random.Random, Sequence[str]], str | None]
"""A sentence, the dice and the documentation's names → the edited sentence, or None where it has nothing to edit."""


def _substitute(pattern: re.Pattern[str], sentence: str, dice: random.Random, new: Callable[[str], str]) -> str | None:
    places = list(pattern.finditer(sentence))
    if not places:
        return None
    place = dice.choice(places)
    return sentence[: place.start()] + new(place[0]) + sentence[place.end() :]


def number(sentence: str, dice: random.Random, names: Sequence[str]) -> str | None:
    if _VERSION.search(sentence) or _YEAR_OR_DATE.search(sentence):
        return None
    return _substitute(_NUMBER, sentence, dice, lambda old: str(int(old) + dice.choice((1, 2, 5, 10, 90))))


def version(sentence: str, dice: random.Random, names: Sequence[str]) -> str | None:
    def other(old: str) -> str:
        major, minor, *rest = old.split(".")
        return ".".join([major, str(int(minor) + dice.randint(1, 5)), *rest])

    return _substitute(_VERSION, sentence, dice, other)


def date(sentence: str, dice: random.Random, names: Sequence[str]) -> str | None:
    def other(old: str) -> str:
        year = re.search(r"(?:19|20)\d\d", old)
        if year and dice.random() < 0.5:
            return old.replace(year[0], str(int(year[0]) + dice.choice((-2, -1, 1, 3))))
        if year:
            return re.sub(r"(?<=-)\d\d$|\b\d{1,2}(?=,)", lambda day: f"{int(day[0]) % 27 + 1:02}", old)
        return re.sub(r"\d+", lambda day: str(int(day[0]) % 27 + 1), old)

    return _substitute(_YEAR_OR_DATE, sentence, dice, other)


def unit(sentence: str, dice: random.Random, names: Sequence[str]) -> str | None:
    def other(old: str) -> str:
        amount, _, measured = old.partition(" ")
        singular = measured.removesuffix("s")
        return f"{amount} {_OTHER_UNITS.get(singular, 'second')}{'s' if measured.endswith('s') else ''}"

    return _substitute(_QUANTITY, sentence, dice, other)


def negation(sentence: str, dice: random.Random, names: Sequence[str]) -> str | None:
    if _NEGATED.search(sentence):
        return _NEGATED.sub(r"\1", sentence, count=1)
    return _substitute(_AUXILIARY, sentence, dice, lambda verb: f"{verb} not")


def name(sentence: str, dice: random.Random, names: Sequence[str]) -> str | None:
    old = _IDENTIFIER.search(sentence)
    if old is None:
        return None
    other = dice.choice([new for new in names if new not in sentence])
    return re.sub(rf"(?<!\w){re.escape(old[0])}(?!\w)", other, sentence)


def synonyms(sentence: str, dice: random.Random, names: Sequence[str]) -> str | None:
    return _in_other_words(sentence, SYNONYMS)


def other_form(sentence: str, dice: random.Random, names: Sequence[str]) -> str | None:
    return _in_other_words(sentence, SAME_IN_OTHER_FORM)


def _in_other_words(sentence: str, table: dict[str, str]) -> str | None:
    changed = sentence
    for old, new in table.items():
        changed = re.sub(rf"\b{re.escape(old)}(?!\w)", new, changed)
    return changed if changed != sentence else None


def reformatted(sentence: str, dice: random.Random, names: Sequence[str]) -> str | None:
    changed = re.sub(r"\*(\w+)\*", r"`\1`", " ".join(sentence.split()))
    changed = changed.replace("’", "'").replace("“", '"').replace("”", '"').replace('"', "`")
    words = changed.split(" ")
    words[dice.randrange(len(words))] += "\n"
    return " ".join(words).replace("\n ", "\n")


POSITIVE: dict[str, Change] = {
    "number": number,
    "version": version,
    "date": date,
    "unit": unit,
    "name": name,
    "negation": negation,
}
NEGATIVE: dict[str, Change] = {"synonyms": synonyms, "other form": other_form, "reformatted": reformatted}
REORDERED = "reordered"


def is_held_out(document: str) -> bool:
    return hashlib.sha256(document.encode()).digest()[0] % 2 == 1


def with_generated(pieces: Sequence[Piece]) -> list[Piece]:
    """Add sentences with a date or a unit to passages of the documents in which edits are planted."""
    dice = random.Random(SEED)
    results = list(pieces)
    by_document: dict[str, list[int]] = {}
    for n, piece in enumerate(pieces):
        if is_held_out(piece.document) and _SENTENCE.search(piece.text):
            by_document.setdefault(piece.document, []).append(n)
    for document, places in by_document.items():
        chosen = dice.sample(places, min(len(places), len(GENERATED)))
        for n, template in zip(chosen, dice.sample(GENERATED, len(chosen)), strict=True):
            text = results[n].text
            end = dice.choice(list(_SENTENCE.finditer(text))).end()
            results[n] = results[n]._replace(text=f"{text[:end]} {_generated(template, document, dice)}{text[end:]}")
    return results


def _generated(template: str, document: str, dice: random.Random) -> str:
    day = datetime(2019, 1, 1, tzinfo=UTC) + timedelta(days=dice.randrange(2_500))
    return template.format(
        topic=document.removeprefix("topic."),
        date=dice.choice((f"{day:%Y-%m-%d}", f"{day:%B} {day.day}, {day.year}")),
        amount=dice.randint(2, 90),
        unit=dice.choice(("seconds", "minutes", "hours", "days")),
    )


def plant(pieces: Sequence[Piece]) -> list[Edit]:
    """Make the edits, of each kind as many as of the others as far as the documentation has sentences for them."""
    dice = random.Random(SEED)
    places = [
        (piece, sentence.span())
        for piece in pieces
        if is_held_out(piece.document)
        for sentence in _SENTENCE.finditer(piece.text)
        if 6 <= len(sentence[0].split()) <= 60 and not _CODE.search(sentence[0])
    ]
    names = sorted({match[0] for piece in pieces for match in _IDENTIFIER.finditer(piece.text)})
    positives = round(EDITS * POSITIVE_SHARE)
    return _edits(POSITIVE, positives, places, names, dice) + _edits(
        {**NEGATIVE, REORDERED: reformatted}, EDITS - positives, places, names, dice
    )


def _edits(
    kinds: dict[str, Change],
    count: int,
    places: Sequence[tuple[Piece, tuple[int, int]]],
    names: Sequence[str],
    dice: random.Random,
) -> list[Edit]:
    suitable = {
        kind: [place for place in places if change(place[0].text[slice(*place[1])], random.Random(0), names)]
        for kind, change in kinds.items()
    }
    for of in suitable.values():
        dice.shuffle(of)
    edits: dict[str, Edit] = {}
    rounds = 0
    while len(edits) < count and rounds < 20 * count:
        kind = list(kinds)[rounds % len(kinds)]
        of = suitable[kind]
        turn, rounds = rounds // len(kinds), rounds + 1
        if turn >= 2 * len(of):
            continue
        piece, span = of[turn % len(of)]
        edit = _edit(
            kind, kinds[kind], piece, span, names, dice, "copy" if turn % 2 == (turn // len(of)) else "excerpt"
        )
        if edit is not None:
            edits.setdefault(edit.text, edit)
    return list(edits.values())


def _edit(
    kind: str,
    change: Change,
    piece: Piece,
    span: tuple[int, int],
    names: Sequence[str],
    dice: random.Random,
    form: str,
) -> Edit | None:
    start, end = span
    around = list(_SENTENCE.finditer(piece.text))
    at = next(n for n, sentence in enumerate(around) if sentence.start() == start)
    if kind == REORDERED:
        if at + 1 >= len(around):
            return None
        following = around[at + 1]
        new = following[0] + " " + piece.text[start:end]
        end = following.end()
    else:
        changed = change(piece.text[start:end], dice, names)
        if changed is None:
            return None
        new = changed
    if form == "copy":
        before, after = piece.text[:start], piece.text[end:]
    else:
        first, last = max(0, at - 1), min(len(around) - 1, at + 1)
        before, after = piece.text[around[first].start() : start], piece.text[end : max(end, around[last].end())]
    return Edit(kind, form, piece.document, before + new + after, (len(before), len(before) + len(new)))


# Measurement


async def vectors(model: Embedder, texts: Sequence[str]) -> np.ndarray[Any, Any]:
    batches = [await model.embed_documents(texts[n : n + BATCH]) for n in range(0, len(texts), BATCH)]
    return np.concatenate([np.asarray(batch.vectors) for batch in batches])


def cut(documents: dict[str, str], model: Embedder) -> list[Piece]:
    pieces = []
    for document, text in documents.items():
        body, kind = normalise(text, "text/plain")
        cuts = chunk(body, kind, params=PARAMS, count_tokens=model.count_tokens)
        pieces += [Piece(document, piece.headings, piece.text) for piece in cuts]
    return pieces


def read(piece: Piece) -> Passage:
    return passage(piece.text, piece.document, piece.document.removeprefix("topic."), piece.headings, WRITTEN)


def is_alarm(result: Comparison | None) -> bool:
    return result is not None and result.kind != "duplicate"


def detect(edits: Sequence[Edit], nearest: np.ndarray[Any, Any], passages: Sequence[Passage]) -> dict[str, Any]:
    rows: dict[str, Counter[str]] = {}
    for n, (edit, near) in enumerate(zip(edits, nearest, strict=True)):
        title = edit.document.removeprefix("topic.") if edit.form == "copy" else f"Notes {n}"
        planted = passage(edit.text, f"planted {n}", title, (), WRITTEN + timedelta(days=90))
        results = [result for result in examine(planted, [passages[k] for k in near]) if is_alarm(result)]
        pairs = [pair for result in results if result for pair in result.pairs]
        hits = [p for p in pairs if edit.changed[0] <= p.a[0] <= edit.changed[1]] if edit.kind in POSITIVE else []
        row = rows.setdefault(edit.kind, Counter())
        row["edits"] += 1
        row[f"{edit.form}: edits"] += 1
        if hits:
            row["detected"] += 1
            row[f"{edit.form}: detected"] += 1
            row["right kind"] += any(p.kind == edit.kind for p in hits)
        row["false alarms"] += len(pairs) > len(hits)
    positives = sum(row["edits"] for kind, row in rows.items() if kind in POSITIVE)
    detected = sum(row["detected"] for row in rows.values())
    false = sum(row["false alarms"] for row in rows.values())
    return {
        "edits": len(edits),
        "precision": round(detected / (detected + false), 4),
        "recall": round(detected / positives, 4),
        "false alarms": false,
        "kinds": {kind: dict(row) for kind, row in rows.items()},
    }


def unmodified(pieces: Sequence[Piece], embedded: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Count the pairs that are reported in text as it is, and the processor time of each chunk: to read it and all of
    its neighbours, none of them cached, and to compare them."""
    alarms: set[tuple[int, int]] = set()
    duplicates: set[tuple[int, int]] = set()
    similar = embedded @ embedded.T
    np.fill_diagonal(similar, -1)
    nearest = np.argsort(-similar, axis=1)[:, :NEIGHBOURS]
    times = []
    for n, near in enumerate(nearest):
        started = process_time()
        results = examine(read(pieces[n]), [read(pieces[k]) for k in near])
        times.append(process_time() - started)
        for k, result in zip(near, results, strict=True):
            if result is not None:
                (alarms if is_alarm(result) else duplicates).add((min(n, int(k)), max(n, int(k))))
    return {
        "chunks": len(pieces),
        "false alarms": len(alarms),
        "false alarms in": sorted({f"{pieces[a].document} / {pieces[b].document}" for a, b in alarms}),
        "duplicates": len(duplicates),
        "milliseconds a chunk": round(float(np.mean(times)) * 1e3, 3),
        "milliseconds a chunk p95": round(float(np.percentile(times, 95)) * 1e3, 3),
    }


async def run() -> dict[str, Any]:
    model = embedder(EmbeddingSettings(), dist() / "models")
    pieces = cut(collection().documents, model)
    embedded = await vectors(model, [piece.text for piece in pieces])
    others = cut(documented_members(sorted(sys.stdlib_module_names - set(MODULES))), model)
    others_embedded = await vectors(model, [piece.text for piece in others])
    extended = with_generated(pieces)
    changed = [n for n, piece in enumerate(pieces) if piece != extended[n]]
    around = embedded.copy()
    around[changed] = await vectors(model, [extended[n].text for n in changed])
    edits = plant(extended)
    planted = await vectors(model, [edit.text for edit in edits])
    await model.aclose()
    nearest = np.argsort(-(planted @ around.T), axis=1)[:, :NEIGHBOURS]
    return {
        "planted": detect(edits, nearest, [read(piece) for piece in extended]),
        "unmodified": {
            "documentation": unmodified(pieces, embedded),
            "other modules": unmodified(others, others_embedded),
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="where the result goes")
    options = parser.parse_args(arguments)
    began = moment()
    result = {**began, **asyncio.run(run())}
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
