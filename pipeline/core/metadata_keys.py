"""Declared keys of metadata: how a value becomes a term that both stores hold, and a filter conditions on terms.

A term is ``NAME=VALUE``, where VALUE is written so that the order of the terms of one key (by code point) is the order
of its values. So one list of texts for each document serves equality and ranges of every type, in both stores.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from typing import Literal, get_args

from pipeline.core.normalise import clean

KeyType = Literal["keyword", "number", "date", "boolean"]
KEY_TYPES: tuple[KeyType, ...] = get_args(KeyType)
Scalar = str | int | float | bool

MAX_VALUE_CHARACTERS = 500
"""The longest value that is indexed. A longer one is kept with the document, and no filter matches it."""
MAX_VALUES = 100
"""The most values of one key of one document that are indexed, in the order of their terms."""
NAME = re.compile(r"[\w.-]{1,100}")
"""A key that can be declared: letters, digits, ``_``, ``.`` and ``-``."""
_ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d([Tt ].*)?", re.DOTALL)
_LAST = "\U0010ffff"
"""The last code point, after every character that a value can begin with."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The terms between two terms, in the order of code points."""

    low: str
    high: str
    includes_low: bool = True
    includes_high: bool = True


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """Conditions on one key, which must all hold, in terms. Each value is given by all terms that may stand for it."""

    name: str
    any: tuple[str, ...] = ()
    """At least one of these; empty: no condition."""
    all: tuple[tuple[str, ...], ...] = ()
    """Groups of which each has to be met by one of its terms."""
    none: tuple[str, ...] = ()
    """None of these. A document without the key matches."""
    within: Interval | None = None
    """At least one term lies in here."""

    def __bool__(self) -> bool:
        return bool(self.any or self.all or self.none or self.within)


def key_filter(
    name: str,
    *,
    any: Iterable[Scalar] = (),
    all: Iterable[Scalar] = (),
    none: Iterable[Scalar] = (),
    **bounds: Scalar,
) -> KeyFilter:
    """A filter by the values of a key. bounds: ``gte``, ``gt``, ``lte``, ``lt``; at least one value lies within all of
    them. Raises ValueError for a value or bounds that no value of any type can match."""
    return KeyFilter(
        name,
        _equal(name, any),
        tuple(_equal(name, [value]) for value in all),
        _equal(name, none),
        _within(name, bounds) if bounds else None,
    )


def terms(metadata: Mapping[str, object], declared: Mapping[str, KeyType]) -> list[str]:
    """The terms of a document, sorted and unique. declared: the tenant's keys. A value that is not of its key's type,
    too long or empty is left out."""
    all_terms: list[str] = []
    for name, kind in declared.items():
        value = metadata.get(name)
        values = value if isinstance(value, list) else [value]
        written = {text for item in values if (text := _written(item, kind)) is not None}
        all_terms += [f"{name}={text}" for text in sorted(written)[:MAX_VALUES]]
    return sorted(all_terms)


def _written(value: object, kind: KeyType) -> str | None:
    """A value as it stands in a term of this type; None: it has no such form."""
    match kind:
        case "boolean":
            text = str(value).lower()
            return text if isinstance(value, bool | str) and text in ("true", "false") else None
        case "number":
            return _number(value)
        case "date":
            return _moment(value)
        case "keyword":
            return _keyword(value)


def _keyword(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        return None
    text = clean(str(value)).strip()  # people and models, who write filters, see no hidden characters
    return text if 0 < len(text) <= MAX_VALUE_CHARACTERS else None


def _number(value: object) -> str | None:
    """``#`` and the 16 hexadecimal digits of the number as a double, with the bits flipped so that they sort."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value) + 0.0  # -0.0 is 0.0
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number):
        return None
    (bits,) = struct.unpack(">Q", struct.pack(">d", number))
    return f"#{bits ^ (0xFFFF_FFFF_FFFF_FFFF if bits >> 63 else 1 << 63):016x}"


def _moment(value: object) -> str | None:
    """RFC 3339 in UTC with six digits of the second. A date is its first moment; a time without a zone is in UTC."""
    if not isinstance(value, str) or not _ISO_DATE.fullmatch(value.strip()):
        return None
    try:
        if len(value.strip()) == 10:
            moment = datetime.combine(date.fromisoformat(value.strip()), time(), UTC)
        else:
            moment = datetime.fromisoformat(value.strip().upper())
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"  # strftime pads no years


def _equal(name: str, values: Iterable[Scalar]) -> tuple[str, ...]:
    """The terms that stand for any of these values, whatever the type of the key: a key has terms of its own type only,
    and the forms of two types do not meet."""
    terms: set[str] = set()
    for value in values:
        forms = {form for kind in KEY_TYPES if (form := _written(value, kind)) is not None}
        if not forms:
            raise ValueError(f"a value of {name} is empty or longer than {MAX_VALUE_CHARACTERS} characters")
        terms |= {f"{name}={form}" for form in forms}
    return tuple(sorted(terms))


def _within(name: str, bounds: Mapping[str, Scalar]) -> Interval:
    """Numbers are compared as numbers, texts that are all dates or times as times, other texts by code points."""
    numbers = [bound for bound in bounds.values() if not isinstance(bound, str)]
    if numbers and len(numbers) < len(bounds):
        raise ValueError(f"the bounds of {name} are a number and a text")
    forms = ((_number, "#", "#~"),) if numbers else ((_moment, "0", ":"), (_keyword, "", _LAST))
    for form, first, last in forms:
        written = {kind: text for kind, bound in bounds.items() if (text := form(bound)) is not None}
        if len(written) == len(bounds):
            low = max((text, kind == "gt") for kind, text in [("gte", first), *written.items()] if kind[0] == "g")
            high = min((text, kind == "lte") for kind, text in [("lte", last), *written.items()] if kind[0] == "l")
            return Interval(f"{name}={low[0]}", f"{name}={high[0]}", not low[1], high[1])
    raise ValueError(
        f"the bounds of {name} are no numbers, dates or texts of at most {MAX_VALUE_CHARACTERS} characters"
    )


def value_of(term: str, kind: KeyType) -> Scalar:
    """The value that a term of a key of this type stands for: the inverse of ``terms``."""
    text = term.partition("=")[2]
    match kind:
        case "boolean":
            return text == "true"
        case "number":
            bits = int(text[1:], 16)
            bits ^= 1 << 63 if bits >> 63 else 0xFFFF_FFFF_FFFF_FFFF
            (number,) = struct.unpack(">d", struct.pack(">Q", bits))
            return int(number) if number.is_integer() and abs(number) < 2**53 else float(number)
        case "date":
            return text.removesuffix("T00:00:00.000000Z") if text.endswith("T00:00:00.000000Z") else _short(text)
        case "keyword":
            return text


def _short(moment: str) -> str:
    return moment.removesuffix(".000000Z") + "Z" if moment.endswith(".000000Z") else moment
