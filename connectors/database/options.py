"""The options of a source that reads the rows of a table."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from connectors.base import ReadersOptions

Text = Literal["text/plain", "text/markdown", "text/html"]


class DatabaseOptions(ReadersOptions):
    """``title``, ``text``, ``url`` and ``author`` are texts in which ``{column}`` stands for a value of the row.
    acl_tags hold for every row, unless ``acl`` names columns; required_tags hold in addition to those in columns."""

    dsn: SecretStr
    """Address of the database, as SQLAlchemy writes it: ``postgresql://user:password@host/database``."""
    table: str | None = None
    """The table or view to read, with its schema if it needs one: ``support.tickets``."""
    query: str | None = None
    """A SELECT to read instead of a table, with a row for each document."""
    id: tuple[str, ...] = Field(("id",), min_length=1)
    """The columns that identify a row: whole numbers, texts or UUIDs that never change."""
    title: str
    """Title of a document: ``{subject}``."""
    text: str
    """Text of a document: ``{subject}\\n\\n{body}``."""
    media_type: Text = "text/plain"
    """The type of ``text``."""
    url: str | None = None
    """Address at which a person opens the row: ``https://…/{id}``, or ``{column}`` for a column of addresses."""
    author: str | None = None
    """The name of the author: ``{author_name}``."""
    modified: str | None = None
    """The column with the time of the last change, shown to people."""
    metadata: tuple[str, ...] = ()
    """Columns that can be filtered by."""
    acl: tuple[str, ...] = ()
    """Columns with tags, of which a reader needs any: an array, a JSON array, or texts separated by commas."""
    required: tuple[str, ...] = ()
    """Columns with tags, of which a reader needs all. NULL denies everybody."""
    members_query: str | None = None
    """A SELECT with a row for each membership, with the columns ``tag`` and ``principal``."""
    deleted: str | None = None
    """The column that marks a row as deleted: a time or true. NULL, false and 0 mean that the row exists."""
    revision: str | None = None
    """The column with another value after each change of the row. Without it each listing reads all texts."""
    changed: str | None = None
    """The column with the time of each change, by which polls find changed rows. Without it each poll lists all."""
    overlap_seconds: float = Field(300, ge=0, le=86_400)
    """How far back a poll reads again: longer than the longest transaction that writes to the table, because a row's
    time is older than its commit."""
    timeout_seconds: float = Field(60, gt=0, le=3_600)
    """The longest that a statement may take in Postgres."""

    @field_validator("title", "text", "url", "author")
    @classmethod
    def _is_a_template(cls, template: str | None) -> str | None:
        if template is not None:
            names = list(columns_of(template))
            if not all(name.isidentifier() for name in names):
                raise ValueError("write {column}, without anything else between the braces")
        return template

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("https://", "http://")) and not is_a_column(url):
            raise ValueError("write an https address with {column} in it, or {column} alone")
        return url

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.table is None) == (self.query is None):
            raise ValueError("write either table or query")
        if self.acl and self.acl_tags:
            raise ValueError("acl_tags would open every row to their holders: write either acl or acl_tags")
        if self.members_query is not None and (self.members or self.members_file):
            raise ValueError("write either members_query, or members and members_file")
        return self


def columns_of(template: str) -> Iterator[str]:
    """Yield the columns of a template. Raises ValueError if it is none."""
    for _, name, specification, conversion in string.Formatter().parse(template):
        if name is not None:
            yield f"{name}!{conversion}" if conversion else f"{name}:{specification}" if specification else name


def is_a_column(template: str) -> bool:
    """Return whether a template is the value of a column and nothing else."""
    return template.startswith("{") and template.endswith("}") and list(columns_of(template)) == [template[1:-1]]
