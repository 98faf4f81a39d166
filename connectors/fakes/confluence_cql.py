"""A parser for the part of the Confluence Query Language that the fake understands.

https://developer.atlassian.com/cloud/confluence/cql-fields and …/cql-functions. Fields: type, space, id, content,
container, ancestor, parent, lastmodified, created. Operators: = != in, not in, and for dates > >= < <=; now("-15m").
Dates without a zone are in the caller's zone; all times are compared by the minute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from connectors.fakes.confluence_state import Item, Kind, State

TOKEN = re.compile(r"""\s*(?:("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(!=|>=|<=|[=<>(),])|([^\s()=<>!,"']+))""")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
DATE_FORMATS = ("%Y/%m/%d %H:%M", "%Y-%m-%d %H:%M", "%Y/%m/%d", "%Y-%m-%d")
SEARCHED: Sequence[Kind] = ("page", "blogpost", "comment", "attachment")
Test = Callable[[Item], bool]


class CqlError(Exception):
    """The query cannot be parsed; the response is 400."""


@dataclass(frozen=True)
class Clause:
    """A condition, and where to look for what meets it: nothing outside of these does."""

    test: Test
    items: Sequence[Item] | None = None
    kinds: frozenset[str] | None = None
    spaces: frozenset[str] | None = None


@dataclass(frozen=True)
class Query:
    where: Clause
    order: Sequence[tuple[str, bool]]
    """The fields to sort by, each with whether it is descending."""


@dataclass(frozen=True)
class Index:
    """The search index, which lags behind the content by ``delay``."""

    state: State
    delay: timedelta
    zone: ZoneInfo

    def known(self, item: Item) -> list[datetime]:
        return [at for at in item.versions if at + self.delay <= self.state.now()]

    def modified(self, item: Item) -> datetime:
        return self.known(item)[-1]


class _Parser:
    def __init__(self, text: str, index: Index) -> None:
        self.index = index
        self.tokens: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            if not (match := TOKEN.match(text, at)):
                raise CqlError(f"Could not parse cql : {text}")
            self.tokens.append(match.group(match.lastindex or 0))
            at = match.end()
        self.at = 0

    def peek(self, offset: int = 0) -> str:
        return self.tokens[self.at + offset].lower() if self.at + offset < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.peek()
        if not token or (expected and token not in expected):
            raise CqlError(f"Could not parse cql : expected {' or '.join(expected) or 'more'}, got '{token}'")
        self.at += 1
        return self.tokens[self.at - 1]

    def query(self) -> Query:
        where = Clause(lambda item: True) if self.peek() in ("order", "") else self.either()
        order = []
        if self.peek() == "order":
            self.take()
            self.take("by")
            while True:
                name = self.take().lower()
                order.append((name, self.peek() == "desc"))
                if self.peek() in ("asc", "desc"):
                    self.take()
                if self.peek() != ",":
                    break
                self.take()
        if self.peek():
            raise CqlError(f"Could not parse cql : unexpected '{self.peek()}'")
        return Query(where, order)

    def either(self) -> Clause:
        clauses = [self.both()]
        while self.peek() == "or":
            self.take()
            clauses.append(self.both())
        return clauses[0] if len(clauses) == 1 else Clause(lambda item: any(clause.test(item) for clause in clauses))

    def both(self) -> Clause:
        clauses = [self.clause()]
        while self.peek() == "and":
            self.take()
            clauses.append(self.clause())
        return Clause(
            lambda item: all(clause.test(item) for clause in clauses),
            min((clause.items for clause in clauses if clause.items is not None), key=len, default=None),
            next((clause.kinds for clause in clauses if clause.kinds is not None), None),
            next((clause.spaces for clause in clauses if clause.spaces is not None), None),
        )

    def clause(self) -> Clause:
        if self.peek() == "(":
            self.take()
            inner = self.either()
            self.take(")")
            return inner
        if self.peek() == "not":
            self.take()
            negated = self.clause()
            return Clause(lambda item: not negated.test(item))
        name = self.take().lower()
        if name in ("lastmodified", "created"):
            return self.date(name)
        if name not in FIELDS:
            raise CqlError(f"Could not parse cql : no field exists with name '{name}'")
        values = FIELDS[name]
        operator = self.take("=", "!=", "in", "not").lower()
        if operator == "not":
            self.take("in")
        expected = self.many() if operator in ("in", "not") else {self.value()}
        index = self.index
        if operator in ("!=", "not"):
            return Clause(lambda item: not values(item, index) & expected)
        return Clause(
            lambda item: bool(values(item, index) & expected),
            LOOKUPS[name](index.state, expected) if name in LOOKUPS else None,
            frozenset(expected) if name == "type" else None,
            frozenset(expected) if name in ("space", "space.key") else None,
        )

    def many(self) -> set[str]:
        self.take("(")
        values = {self.value()}
        while self.peek() == ",":
            self.take()
            values.add(self.value())
        self.take(")")
        return values

    def value(self) -> str:
        token = self.take()
        return re.sub(r"\\(.)", r"\1", token[1:-1]) if token[0] in "\"'" else token

    def date(self, name: str) -> Clause:
        operator = self.take(">", ">=", "<", "<=", "=")
        limit = self.moment()
        index = self.index

        def test(item: Item) -> bool:
            at = _minute(index.modified(item) if name == "lastmodified" else item.versions[0])
            return {">": at > limit, ">=": at >= limit, "<": at < limit, "<=": at <= limit, "=": at == limit}[operator]

        is_late = name == "lastmodified" and operator in (">", ">=", "=")
        return Clause(test, index.state.written_since(limit) if is_late else None)

    def moment(self) -> datetime:
        text = self.value()
        if text.lower() == "now":
            self.take("(")
            shift = "" if self.peek() == ")" else self.value()
            self.take(")")
            if not (match := re.fullmatch(r"([+-]?)(\d+)([mhdw])|", shift)):
                raise CqlError("Could not parse cql : bad increment")
            sign, count, unit = match.groups()
            delta = timedelta(**{UNITS[unit]: int(count)}) if unit else timedelta()
            return _minute(self.index.state.now() + (-delta if sign == "-" else delta))
        for form in DATE_FORMATS:
            try:
                return datetime.strptime(text, form).replace(tzinfo=self.index.zone)
            except ValueError:
                continue
        raise CqlError(f"Could not parse cql : '{text}' is no date")


FIELDS: dict[str, Callable[[Item, Index], set[str]]] = {
    "type": lambda item, index: {item.kind},
    "space": lambda item, index: {item.space},
    "space.key": lambda item, index: {item.space},
    "id": lambda item, index: {item.id, item.id.removeprefix("att")},
    "content": lambda item, index: {item.id},
    "container": lambda item, index: {item.container} if item.container else set(),
    "parent": lambda item, index: {item.parent} if item.parent else set(),
    "ancestor": lambda item, index: (
        {ancestor.id for ancestor in index.state.chain(item)[:-1]} if not item.container else set()
    ),
}


def _by_id(state: State, ids: set[str]) -> list[Item]:
    spellings = {spelling for id_ in ids for spelling in (id_, f"att{id_}")}
    return [state.items[id_] for id_ in spellings if id_ in state.items]


LOOKUPS: dict[str, Callable[[State, set[str]], list[Item]]] = {
    "id": _by_id,
    "content": _by_id,
    "container": lambda state, ids: [part for id_ in ids for part in state.parts(id_)],
    "ancestor": lambda state, ids: [page for id_ in ids for page in state.below(id_)],
}
"""Where to look for items by the values of a field."""


def parse(text: str, index: Index) -> Query:
    """Parse a query. Raises CqlError."""
    return _Parser(text, index).query()


def search(text: str, index: Index) -> list[Item]:
    """Return the current content that is indexed and matches, in the requested order. Raises CqlError."""
    query, state = parse(text, index), index.state
    where = query.where
    kinds = [kind for kind in SEARCHED if where.kinds is None or kind in where.kinds]
    candidates = state.listed(kinds, where.spaces) if where.items is None else where.items
    matching = {
        item.number: item
        for item in candidates
        if item.kind in kinds and state.is_current(item) and index.known(item) and where.test(item)
    }
    items = [matching[number] for number in sorted(matching)]
    for name, descending in reversed(query.order):
        if name not in ("lastmodified", "created", "id"):
            raise CqlError(f"Could not parse cql : cannot order by '{name}'")
        items.sort(key=lambda item: _sort_key(name, item, index), reverse=descending)
    return items


def _sort_key(name: str, item: Item, index: Index) -> tuple[float, int]:
    if name == "id":
        return (0.0, item.number)
    return (_minute(index.modified(item) if name == "lastmodified" else item.versions[0]).timestamp(), item.number)


def _minute(at: datetime) -> datetime:
    return at.replace(second=0, microsecond=0)
