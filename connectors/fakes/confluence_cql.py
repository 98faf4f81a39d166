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

from connectors.fakes.confluence_state import Item, State

TOKEN = re.compile(r"""\s*(?:("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(!=|>=|<=|[=<>(),])|([^\s()=<>!,"']+))""")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
DATE_FORMATS = ("%Y/%m/%d %H:%M", "%Y-%m-%d %H:%M", "%Y/%m/%d", "%Y-%m-%d")
Test = Callable[[Item], bool]


class CqlError(Exception):
    """The query cannot be parsed; the response is 400."""


@dataclass(frozen=True)
class Query:
    test: Test
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
        test: Test = (lambda item: True) if self.peek() in ("order", "") else self.either()
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
        return Query(test, order)

    def either(self) -> Test:
        tests = [self.both()]
        while self.peek() == "or":
            self.take()
            tests.append(self.both())
        return lambda item: any(test(item) for test in tests)

    def both(self) -> Test:
        tests = [self.clause()]
        while self.peek() == "and":
            self.take()
            tests.append(self.clause())
        return lambda item: all(test(item) for test in tests)

    def clause(self) -> Test:
        if self.peek() == "(":
            self.take()
            test = self.either()
            self.take(")")
            return test
        if self.peek() == "not":
            self.take()
            negated = self.clause()
            return lambda item: not negated(item)
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
        if operator in ("=", "in"):
            return lambda item: bool(values(item, index) & expected)
        return lambda item: not values(item, index) & expected

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

    def date(self, name: str) -> Test:
        operator = self.take(">", ">=", "<", "<=", "=")
        limit = self.moment()
        index = self.index

        def test(item: Item) -> bool:
            at = _minute(index.modified(item) if name == "lastmodified" else item.versions[0])
            return {">": at > limit, ">=": at >= limit, "<": at < limit, "<=": at <= limit, "=": at == limit}[operator]

        return test

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


def parse(text: str, index: Index) -> Query:
    """Parse a query. Raises CqlError."""
    return _Parser(text, index).query()


def search(text: str, index: Index) -> list[Item]:
    """Return the current content that is indexed and matches, in the requested order. Raises CqlError."""
    query = parse(text, index)
    items = [
        item
        for item in index.state.current("page", "blogpost", "comment", "attachment")
        if index.known(item) and query.test(item)
    ]
    for name, descending in reversed(query.order):
        if name not in ("lastmodified", "created", "id"):
            raise CqlError(f"Could not parse cql : cannot order by '{name}'")
        items.sort(key=lambda item: _sort_key(name, item, index), reverse=descending)
    return items


def _sort_key(name: str, item: Item, index: Index) -> tuple[float, int]:
    number = int(item.id.removeprefix("att"))
    if name == "id":
        return (0.0, number)
    return (_minute(index.modified(item) if name == "lastmodified" else item.versions[0]).timestamp(), number)


def _minute(at: datetime) -> datetime:
    return at.replace(second=0, microsecond=0)
