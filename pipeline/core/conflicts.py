"""Whether two passages contradict each other, are duplicates, or one is an older edition of the other.

Statements are compared that have the same content words (``pipeline.core.statements``), in any order: a
contradiction is a number, date, version, unit or name that differs, or a negation on one side. Near-equal sentences
about different things are frequent, as in the reference of similar functions, so that a contradiction also needs a
context that fits: a long enough statement, no titles that differ in one word only (``Release 3.8``, ``Release 3.9``),
and for short statements and names further statements that both passages have. Pure, and linear in the passages.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from pipeline.core.model import ConflictKind, Span
from pipeline.core.statements import REPLACED, Name, Said, Statement, Value, statements_of

Kind = ConflictKind
OlderSide = Literal["a", "b"] | None
KINDS: tuple[Kind, ...] = get_args(Kind)

LEAST_WEIGHT = 2
"""The fewest content words of a statement that contradicts another of a passage with the same context."""
LEAST_WEIGHT_ALONE = 3
"""The same, where the passages share nothing else."""
LEAST_WEIGHT_MEASURED = 2
"""The same for a quantity with a unit, and for a date."""
LEAST_WEIGHT_IN_ONE_DOCUMENT = 7
"""The same for two parts of one document, whose sections often repeat a sentence with other values."""
LEAST_WEIGHT_NAME = 3
MOST_DIFFERENT_VALUES = 2
"""The most values of a statement that may differ; more are rows of a table."""
PARALLEL = 2
"""The number of different values that neighbours have for a statement, from which on it is one of a list."""
COPIED_SHARE = 0.6
"""The share of a passage's statements that the other repeats, from which on it is a copy."""
LEAST_COPIED = 2
"""The fewest equal statements of a copy."""
MOST_NEEDED = 100
"""A passage with more statements is always compared: looking for the words of each would cost more than it saves."""
REWORDED_SHARE = 0.5
"""The share of content words that a statement has in common with what it replaces, from which on it is reworded."""

_PART_OF_TITLE = re.compile(r"[^\W_]+")
_SUFFIX = re.compile(r"\.(?:md|txt|rst|html?|pdf|docx?)$", re.IGNORECASE)


class Pair(NamedTuple):
    """Two places that contradict each other, in characters of their passages."""

    kind: Kind
    a: Span
    b: Span
    of_a: Statement
    of_b: Statement


@dataclass(frozen=True)
class Passage:
    """A passage as it is compared. Its statements are read only when they are needed: of most neighbours they are not,
    and reading them is nearly the whole cost of comparing."""

    document: str
    """Two passages of the same document have the same."""
    title: str
    headings: tuple[str, ...]
    modified_at: datetime | None
    text: str

    @cached_property
    def statements(self) -> Sequence[Statement]:
        return _whole(statements_of(self.text), self.text)

    @cached_property
    def text_key(self) -> str:
        """Equal for passages that differ at most in white space, case and markup."""
        return _MARKUP.sub(" ", self.text).strip().lower()

    @cached_property
    def needed(self) -> Sequence[Sequence[str]]:
        """The content words of each statement, ``_folded``, the longest first. A text with a statement of the same
        content words contains all words of at least one of them."""
        return [
            sorted({_folded(word) for word in statement.key if word not in REPLACED}, key=len, reverse=True)
            for statement in self.statements
        ]

    def may_share_words(self, other: Passage) -> bool:
        """Return False if no statement of this passage has the content words of a statement of the other. A cheap test,
        before the other's statements are read."""
        if len(self.statements) > MOST_NEEDED:
            return True
        text = _folded(other.text)
        return any(all(word in text for word in words) for words in self.needed)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two passages disagree or repeat each other."""

    kind: Kind
    pairs: tuple[Pair, ...] = ()
    """The contradicting places; none of duplicates, and the replaced statements of an outdated copy."""
    older: OlderSide = None
    """The older side, where both times are known and differ."""


_LETTER = re.compile(r"[^\W_]")
_MARKUP = re.compile(r"[\W_]+")


def passage(
    text: str, document: str, title: str = "", headings: Sequence[str] = (), modified_at: datetime | None = None
) -> Passage:
    """A passage of a text. document: what identifies its document."""
    return Passage(document, title, tuple(headings), modified_at, text)


def _folded(text: str) -> str:
    """The text in the letters of the words of statements. A sigma has another form where a word ends."""
    return text.lower().replace("’", "'").replace("ς", "σ")


def _whole(statements: list[Statement], text: str) -> list[Statement]:
    """The statements without a fragment at the beginning, where the passage begins within a sentence."""
    first = _LETTER.search(text, statements[0].span[0]) if len(statements) > 1 else None
    return statements[1:] if first is not None and first[0].islower() else statements


def examine(new: Passage, neighbours: Sequence[Passage]) -> list[Comparison | None]:
    """Compare a passage with its neighbours, and return the result of each.

    A contradiction counts for nothing where the other document also has the statement as it is in the new passage, or
    where the neighbours have several different values for it: it is one of a list of parallel statements.
    """
    results = [compare(new, neighbour) for neighbour in neighbours]
    if not any(result is not None and result.pairs for result in results):
        return results
    said_by_document: defaultdict[str, set[Said]] = defaultdict(set)
    for neighbour in neighbours:
        said_by_document[neighbour.document].update(s.said for s in neighbour.statements)
    said_by_document[new.document].update(s.said for s in new.statements)
    values: defaultdict[Span, set[Said]] = defaultdict(set)
    for result in results:
        for pair in result.pairs if result else ():
            values[pair.of_a.span].add(pair.of_b.said)

    def stands(pair: Pair, document: str) -> bool:
        return (
            len(values[pair.of_a.span]) < PARALLEL
            and pair.of_a.said not in said_by_document[document]
            and pair.of_b.said not in said_by_document[new.document]
        )

    return [
        _without(result, neighbour, stands) if result is not None else None
        for result, neighbour in zip(results, neighbours, strict=True)
    ]


def _without(result: Comparison, neighbour: Passage, stands: Callable[[Pair, str], bool]) -> Comparison | None:
    """The result with the pairs that stand. None: it has lost its contradictions."""
    if result.kind == "duplicate":
        return result
    pairs = tuple(pair for pair in result.pairs if pair.kind == "outdated" or stands(pair, neighbour.document))
    if not pairs:
        return None
    kind = result.kind if result.kind == "outdated" else pairs[0].kind
    return Comparison(kind, pairs, result.older)


def compare(a: Passage, b: Passage) -> Comparison | None:
    """Compare two passages. None: they neither contradict nor repeat each other."""
    same_document = a.document == b.document
    if a.text_key == b.text_key:
        return None if same_document or not a.text_key else Comparison("duplicate", (), _older(a, b))
    if not a.may_share_words(b):  # a difference in a name only counts only for copies, which share words
        return None
    said_a, said_b = ({s.said for s in p.statements} for p in (a, b))
    equal = set() if same_document else said_a & said_b  # neighbouring chunks of a document repeat each other's ends
    copied = len(equal) >= LEAST_COPIED and len(equal) >= COPIED_SHARE * (min(len(said_a), len(said_b)) - 1)
    shared = sum(1 for said in equal if len(said[0]) >= LEAST_WEIGHT_NAME)
    context = _Context(a, b, shared=shared, copied=copied, same_document=same_document)
    pairs = _contradictions(a, b, said_a, said_b, context)
    older = _older(a, b)
    if copied and older is not None and (replaced := _replaced(a, b, equal, pairs)):
        return Comparison("outdated", (*pairs, *replaced), older)
    return Comparison(pairs[0].kind, tuple(pairs), older) if pairs else None


def _older(a: Passage, b: Passage) -> OlderSide:
    if a.modified_at is None or b.modified_at is None or a.modified_at == b.modified_at:
        return None
    return "a" if a.modified_at < b.modified_at else "b"


class _Context:
    """The circumstances of a comparison: all but the statements that are compared."""

    def __init__(self, a: Passage, b: Passage, *, shared: int, copied: bool, same_document: bool) -> None:
        self._same_document = same_document
        self._siblings, self._close_siblings = _are_siblings(a, b, 3), _are_siblings(a, b, 2)
        self._copied = copied
        self._fits = shared > 0 or bool(a.title and a.title == b.title and a.headings[-1:] == b.headings[-1:])

    def allows(self, kind: Kind, weight: int, *, measured: bool = False) -> bool:
        """Whether statements of this weight, that differ in this kind, are about the same. measured: their values
        are quantities with a unit, or dates."""
        if self._same_document:
            return kind != "name" and weight >= LEAST_WEIGHT_IN_ONE_DOCUMENT
        if self._siblings:
            return False
        if kind == "name":
            return self._copied and not self._close_siblings and weight >= LEAST_WEIGHT_NAME
        alone = LEAST_WEIGHT_MEASURED if measured else LEAST_WEIGHT_ALONE
        return weight >= (LEAST_WEIGHT if self._fits else alone)


def _are_siblings(a: Passage, b: Passage, least: int) -> bool:
    subjects = [(a.title, b.title), (" ".join(a.headings[-1:]), " ".join(b.headings[-1:]))]
    return any(are_siblings(x, y, least) for x, y in subjects)


def are_siblings(a: str, b: str, least: int = 3) -> bool:
    """Whether two titles of at least that many words differ in one word or number, as those of similar things do."""
    words_a, words_b = (_PART_OF_TITLE.findall(_SUFFIX.sub("", title.lower())) for title in (a, b))
    if len(words_a) != len(words_b) or len(words_a) < least:
        return False
    return [x == y for x, y in zip(words_a, words_b, strict=True)].count(False) == 1


def _contradictions(a: Passage, b: Passage, said_a: set[Said], said_b: set[Said], context: _Context) -> list[Pair]:
    repeated = Counter(s.key for s in a.statements) | Counter(s.key for s in b.statements)
    only_a, only_b = (
        [s for s in p.statements if s.said not in others and repeated[s.key] == 1]  # else a list of different values
        for p, others in ((a, said_b), (b, said_a))
    )
    by_key = {statement.key: statement for statement in only_a}
    pairs = []
    for other in only_b:
        statement = by_key.get(other.key)
        pair = None if statement is None else _differing(statement, other)
        if pair is not None:
            measured = all(v.kind in ("unit", "date") for v in (*pair.of_a.values, *other.values)) and bool(
                other.values
            )
            if context.allows(pair.kind, other.weight, measured=measured):
                pairs.append(pair)
    return pairs + _names(only_a, only_b) if context.allows("name", LEAST_WEIGHT_NAME) else pairs


def _differing(a: Statement, b: Statement) -> Pair | None:
    """Where two statements with the same words contradict each other."""
    values = [(x, y) for x, y in zip(a.values, b.values, strict=True) if x[:3] != y[:3]]
    if values and sorted(a.said[1]) == sorted(b.said[1]):
        return None  # the same values in another order
    if a.negated != b.negated:
        if values:
            return None
        where_a, where_b = (s.negations[0] if s.negations else s.span for s in (a, b))
        return Pair("negation", where_a, where_b, a, b)
    if not 1 <= len(values) <= MOST_DIFFERENT_VALUES:
        return None
    x, y = values[0]
    return Pair(_kind(x, y), x.span, y.span, a, b)


def _kind(a: Value, b: Value) -> Kind:
    if a.kind != b.kind:
        return "unit" if "unit" in (a.kind, b.kind) else "number"
    if a.kind == "unit":
        return "unit" if a.amount == b.amount else "number"
    return a.kind


def _names(only_a: Sequence[Statement], only_b: Sequence[Statement]) -> list[Pair]:
    """The statements that are equal but for one name."""
    by_key: defaultdict[tuple[str, ...], list[tuple[Statement, Name]]] = defaultdict(list)
    for statement in only_a:
        for key, name in _without_names(statement):
            by_key[key].append((statement, name))
    pairs = []
    for other in only_b:
        for key, name in _without_names(other):
            matches = by_key.get(key, ())
            if len(matches) == 1:
                statement, replaced = matches[0]
                if replaced.words != name.words and statement.said[1:] == other.said[1:]:
                    pairs.append(Pair("name", replaced.span, name.span, statement, other))
                    break
    return pairs


def _without_names(statement: Statement) -> Iterator[tuple[tuple[str, ...], Name]]:
    """The key without each of its names in turn, wherever it occurs."""
    if statement.weight <= LEAST_WEIGHT_NAME:
        return
    for words, name in {name.words: name for name in statement.names}.items():
        yield tuple(word for word in statement.key if word not in words), name


def _replaced(a: Passage, b: Passage, equal: set[Said], pairs: Sequence[Pair]) -> list[Pair]:
    """The statements between equal ones that say something else on the other side, and not the same in other words."""
    contradicting = {pair.of_a.span for pair in pairs}
    place_b = {s.said: n for n, s in enumerate(b.statements) if s.said in equal}
    replaced = []
    for before, statement, after in zip(a.statements, a.statements[1:], a.statements[2:], strict=False):
        if statement.said in equal or statement.span in contradicting:
            continue
        start, end = place_b.get(before.said), place_b.get(after.said)
        if start is None or end is None or end != start + 2:
            continue
        other = b.statements[start + 1]
        words, other_words = set(statement.key), set(other.key)
        if len(words & other_words) < REWORDED_SHARE * min(len(words), len(other_words)):
            replaced.append(Pair("outdated", statement.span, other.span, statement, other))
    return replaced
