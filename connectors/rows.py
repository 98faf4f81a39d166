"""Makes documents of rows, as the options declare. Pure."""

from __future__ import annotations

import hashlib
import json
import math
import string
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import quote, unquote
from uuid import UUID

from connectors.faults import OF_DATA
from connectors.row_options import RowOptions, columns_of, is_a_column
from connectors.source import Document, Entry, Gone, Listed, Unreadable
from pipeline.core.errors import Misconfigured
from topics.messages import MAX_CONTENT_BYTES, MAX_TAGS, Scalar

PAGE_BYTES = 16 * 1024 * 1024
"""A page of rows ends early when it takes so much memory: a row may have a hundred megabytes, and a page a thousand of
them."""
VALUE_BYTES = 4 * PAGE_BYTES
"""No list or object of a row takes more memory: some 4 MB of JSON, which is the most that a document holds."""
Row = Mapping[str, Any]
"""Values by column."""
Key = tuple[Any, ...]
"""The values of the columns that identify a row."""
KEY_TYPES: tuple[type, ...] = (int, str, UUID, Decimal)


class BadValue(Exception):
    """A column holds what the declaration does not fit. The message names the column, and never the value."""


@dataclass(frozen=True, slots=True)
class NoValue:
    """Stands in a row for a value that is not known."""

    reason: str
    """The end of a sentence about the column."""


TOO_LARGE = NoValue("holds more than 4 MiB: shorten it")
TOO_MANY = NoValue("holds lists or objects of too many values: shorten them")


class Template:
    """The declared way from a row to a document."""

    def __init__(
        self, options: RowOptions, key: Sequence[str], *, revision: str | None = None, prefix: str = ""
    ) -> None:
        """key: the columns that identify a row. revision: the column with another value after each change of the row;
        None for a digest of the document. prefix: the beginning of all external ids."""
        self._options = options
        self._key = key
        self._revision = revision
        self._prefix = prefix
        templates = [options.title, options.text, options.url, options.author]
        named = [column for template in templates if template for column in columns_of(template)]
        states = [column for column in (options.deleted, revision) if column]
        access = [*options.acl, *options.required]
        others = [*options.metadata, *([options.modified] if options.modified else [])]
        self.columns = _distinct([*key, *states, *access, *named, *others])
        """All columns of which a document is made."""
        self.listed_columns = _distinct([*key, *states, *access]) if revision else self.columns
        """The columns that a listing reads."""
        mapped = options.model_dump_json(
            include={"title", "text", "media_type", "url", "author", "modified", "metadata"}
        )
        self._mapping = hashlib.sha256(mapped.encode()).hexdigest()[:12]
        """Part of each revision: another declaration makes another document of the same row."""

    def key(self, row: Row) -> Key:
        return tuple(row[column] for column in self._key)

    def external_id(self, row: Row) -> str:
        return self._prefix + external_id(self.key(row))

    def listed(self, rows: Iterable[Row]) -> list[Listed]:
        """Return the listing of the rows that are not deleted. rows: ``listed_columns``."""
        entry = self._state if self._revision else self._entry
        return [
            Listed(
                external_id=entry.external_id,
                acl_tags=entry.acl_tags,
                required_tags=entry.required_tags,
                revision=entry.revision,
            )
            for entry in self._unique(map(entry, rows)).values()
            if not isinstance(entry, Gone)
        ]

    def entries(self, rows: Iterable[Row]) -> dict[str, Entry]:
        """Return the documents of rows by external id; Unreadable where a row cannot be one, and without access where
        its access is not known. rows: ``columns``."""
        return self._unique(map(self._entry, rows))

    def _unique(self, entries: Iterable[Entry]) -> dict[str, Entry]:
        """Return the entries by external id. Of several rows with one key nobody knows which says who may read."""
        unique: dict[str, Entry] = {}
        for entry in entries:
            other = unique.setdefault(entry.external_id, entry)
            if isinstance(other, Gone):
                unique[entry.external_id] = entry
            elif other is not entry and not isinstance(entry, Gone):
                unique[entry.external_id] = Unreadable(
                    external_id=entry.external_id,
                    code="ambiguous",
                    message="several rows have this id, so nobody may read it: group them in the query, tags with"
                    " array_agg, or name other columns as id",
                    acl_tags=(),
                    revision="ambiguous",
                )
        return unique

    def _entry(self, row: Row) -> Entry:
        state = self._state(row)
        if isinstance(state, Gone | Unreadable):
            return state
        try:
            document = replace(
                state,
                title=self._text(self._options.title, row),
                content=self._content(row),
                media_type=self._options.media_type,
                source_url=self._url(row),
                author=self._text(self._options.author, row) or None if self._options.author else None,
                source_modified_at=_time(self._options.modified, row),
                metadata={column: _metadata(column, value_of(column, row)) for column in self._options.metadata},
            )
        except BadValue as error:
            return self._unreadable(state, "bad_value", str(error))
        except RecursionError:
            return self._unreadable(state, "bad_value", "a column holds lists that are nested too deeply")
        except OF_DATA as error:
            return self._unreadable(state, "bad_value", f"a column holds what cannot be read ({type(error).__name__})")
        return document if self._revision else replace(document, revision=_digest(document))

    def _state(self, row: Row) -> Document | Gone | Unreadable:
        """Return the document without what the listing does not read."""
        id_, revision = self.external_id(row), None
        if self._revision:
            revision = f"{self._mapping} {row[self._revision]}"
        document = Document(external_id=id_, title="", content="", acl_tags=(), revision=revision)
        try:
            if self._options.deleted and is_true(value_of(self._options.deleted, row)):
                return Gone(id_)
            acl, required = self._access(row)
        except BadValue as error:
            return self._unreadable(document, "bad_access", f"{error}: nobody may read the row")
        except OF_DATA as error:
            message = f"a column holds what cannot be read ({type(error).__name__}): nobody may read the row"
            return self._unreadable(document, "bad_access", message)
        return replace(document, acl_tags=acl, required_tags=required)

    def _unreadable(self, document: Document, code: str, message: str) -> Unreadable:
        if self._revision is None:
            revision = hashlib.sha256(f"{code} {message}".encode()).hexdigest()
        else:  # that of a document with the same text and a valid access has to differ
            revision = f"{document.revision} {code}" if code == "bad_access" else str(document.revision)
        return Unreadable(
            external_id=document.external_id,
            code=code,
            message=message,
            acl_tags=document.acl_tags,
            required_tags=document.required_tags,
            revision=revision,
        )

    def _access(self, row: Row) -> tuple[Collection[str], Collection[str]]:
        acl, required = list(self._options.acl_tags), list(self._options.required_tags)
        for column in self._options.acl:
            acl += tags_of(column, value) if (value := value_of(column, row)) is not None else []
        for column in self._options.required:
            if value_of(column, row) is None:
                raise BadValue(f"the column {column} is NULL, which does not say what a reader needs")
            required += tags_of(column, row[column])
        return tuple(dict.fromkeys(acl)), tuple(dict.fromkeys(required))

    def _text(self, template: str, row: Row) -> str:
        return _filled(template, lambda column: text_of(column, value_of(column, row)))

    def _content(self, row: Row) -> str:
        content = self._text(self._options.text, row)
        if _is_too_long(content):  # of several columns together
            raise BadValue("the text holds more than 4 MiB: shorten it")
        return content

    def _url(self, row: Row) -> str | None:
        template = self._options.url
        if template is None:
            return None
        if is_a_column(template):
            url = self._text(template, row).strip()
            return url if url.startswith(("https://", "http://")) else None
        return _filled(template, lambda column: _quoted(text_of(column, value_of(column, row))))


def external_id(key: Key) -> str:
    """Return the external id of a row: the value of its key column, or the values of several, escaped as in URLs and
    separated by ``/``. Raises Misconfigured for values of another type than KEY_TYPES."""
    if any(isinstance(value, bool) or not isinstance(value, KEY_TYPES) for value in key):
        raise Misconfigured("the columns of id have to hold whole numbers, texts or UUIDs: name others, or cast them")
    return str(key[0]) if len(key) == 1 else "/".join(_quoted(str(value)) for value in key)


def _quoted(text: str) -> str:
    """Return a text as a part of an address. One with half of a character raises nothing here: it concerns its own row,
    which is refused later."""
    return quote(text, safe="", errors="surrogatepass")


def key_of(external_id: str, types: Sequence[type]) -> Key | None:
    """Return the key of an external id, whose values have these types; None if no such row can exist."""
    texts = [external_id] if len(types) == 1 else [unquote(part) for part in external_id.split("/")]
    if len(texts) != len(types):
        return None
    try:
        key = tuple(type_(text) for type_, text in zip(types, texts, strict=True))
    except (ValueError, ArithmeticError):
        return None
    return key if [str(value) for value in key] == texts else None


def value_of(column: str, row: Row) -> Any:
    """Return a value of a row. Raises BadValue for one that is not known."""
    value = row[column]
    if isinstance(value, NoValue):
        raise BadValue(f"the column {column} {value.reason}")
    return value


def tags_of(column: str, value: object) -> list[str]:
    """Return the tags in a value: those of an array, of a JSON array, or texts separated by commas. Raises BadValue."""
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise BadValue(f"the column {column} begins like a JSON array and is none") from error
        else:
            value = [tag for tag in map(str.strip, value.split(",")) if tag]
    values = value if isinstance(value, list | tuple | set | frozenset) else [value]
    if not all(isinstance(tag, str | int | UUID) and not isinstance(tag, bool) and tag != "" for tag in values):
        raise BadValue(f"the column {column} holds something that is no list of tags")
    tags = list(dict.fromkeys(map(str, values)))  # a join without DISTINCT names the same tag many times
    if len(tags) > MAX_TAGS:
        raise BadValue(f"the column {column} holds more than {MAX_TAGS:,} tags")
    return tags


def text_of(column: str, value: object) -> str:
    """Return a value as text. Raises BadValue for binary values."""
    match value:
        case None:
            return ""
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case date():
            return value.isoformat()
        case int() | float() | Decimal() | UUID():
            return str(value)
        case list() | tuple():
            return ", ".join(text_of(column, item) for item in value)
        case dict():
            return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
        case _:
            raise BadValue(f"the column {column} holds {type(value).__name__}, not text: convert it in the query")


def size_of(value: object, most: float = math.inf) -> int:
    """Return about how many bytes of memory a value takes. most: it is not counted further than that."""
    total, waiting = 0, [value]
    while waiting and total <= most:
        value = waiting.pop()
        total += value.nbytes if isinstance(value, memoryview) else sys.getsizeof(value)
        if isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
    return total


def bounded(row: Row, key: Collection[str]) -> dict[str, Any]:
    """Return the row without values that no document can hold, but with those that identify it."""
    return {name: value if name in key else _bounded(value) for name, value in row.items()}


def _bounded(value: Any) -> Any:
    match value:
        case str():
            return TOO_LARGE if _is_too_long(value) else value
        case bytes() | memoryview():
            return TOO_LARGE if len(value) > MAX_CONTENT_BYTES else value
        case list() | tuple() | set() | frozenset() | dict():
            return TOO_MANY if size_of(value, VALUE_BYTES) > VALUE_BYTES else value
        case _:
            return value


def _is_too_long(text: str) -> bool:
    """Return whether no document can hold a text: in UTF-8 a character may have four bytes."""
    if text.isascii() or len(text) > MAX_CONTENT_BYTES:
        return len(text) > MAX_CONTENT_BYTES
    return len(text) > MAX_CONTENT_BYTES // 4 and len(text.encode("utf-8", "surrogatepass")) > MAX_CONTENT_BYTES


def has_surrogates(text: str) -> bool:
    """Whether a text has half of a character (a lone surrogate), which JSON can express and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def is_true(value: object) -> bool:
    """Return whether a value marks a row as deleted."""
    if isinstance(value, bytes | memoryview):  # MySQL's BIT(1)
        return any(bytes(value))
    return value not in (None, False, 0, "", "0", "f", "false")


def time_of(column: str, value: object) -> datetime | None:
    """Return a value as a time: a time (without a zone in UTC), RFC 3339, or a number since 1970 in seconds,
    milliseconds, microseconds or nanoseconds, whichever is between 1973 and 5138. Raises BadValue."""
    try:
        match value:
            case None:
                return None
            case datetime():
                moment = value
            case date():
                moment = datetime(value.year, value.month, value.day)
            case str():
                moment = datetime.fromisoformat(value)
            case int() | float() | Decimal() if not isinstance(value, bool):
                seconds = float(value)
                for _ in range(3):
                    seconds = seconds / 1_000 if abs(seconds) > 1e11 else seconds
                moment = datetime.fromtimestamp(seconds, UTC)
            case _:
                raise BadValue(f"the column {column} holds {type(value).__name__}, not a time")
    except (ValueError, OverflowError, OSError) as error:
        raise BadValue(f"the column {column} holds something that is no time") from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _filled(template: str, value: Callable[[str], str]) -> str:
    """Return the template with the values of its columns."""
    parts = string.Formatter().parse(template)
    return "".join(literal + ("" if name is None else value(name)) for literal, name, _, _ in parts)


def _time(column: str | None, row: Row) -> datetime | None:
    return None if column is None else time_of(column, value_of(column, row))


def _metadata(column: str, value: object) -> Scalar | list[Scalar] | None:
    match value:
        case None | str() | int() | float():
            return value
        case list() | tuple():
            return [item if isinstance(item, str | int | float) else text_of(column, item) for item in value]
        case _:
            return text_of(column, value)


def _digest(document: Document) -> str:
    fields = [
        document.title,
        document.content,
        document.media_type,
        document.source_url,
        document.author,
        document.source_modified_at and document.source_modified_at.timestamp(),
        document.metadata,
    ]
    text = json.dumps(fields, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def _distinct(columns: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(columns))
