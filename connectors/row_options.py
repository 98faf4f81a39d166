"""Options that say which document a row makes: of a table, or of a stream of records."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from connectors.base import TagsOptions

Text = Literal["text/plain", "text/markdown", "text/html"]


class RowOptions(TagsOptions):
    """``title``, ``text``, ``url`` and ``author`` are texts in which ``{column}`` stands for a value of the row.
    acl_tags hold for every row, unless ``acl`` names columns; required_tags hold in addition to those in columns."""

    COLUMN: ClassVar[str] = "column"
    """The name of a column in messages."""

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
    deleted: str | None = None
    """The column that marks a row as deleted: a time or true. NULL, false and 0 mean that the row exists."""

    @staticmethod
    def is_column(name: str) -> bool:
        """Return whether a template may name this column."""
        return name.isidentifier()

    @field_validator("title", "text", "url", "author")
    @classmethod
    def _is_a_template(cls, template: str | None) -> str | None:
        if template is not None and not all(map(cls.is_column, columns_of(template))):
            raise ValueError(f"write {{{cls.COLUMN}}}, without anything else between the braces")
        return template

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("https://", "http://")) and not is_a_column(url):
            raise ValueError(f"write an https address with {{{cls.COLUMN}}} in it, or {{{cls.COLUMN}}} alone")
        return url

    @model_validator(mode="after")
    def _has_one_kind_of_readers(self) -> Self:
        if self.acl and self.acl_tags:
            raise ValueError("acl_tags would open every row to their holders: write either acl or acl_tags")
        return self


def columns_of(template: str) -> Iterator[str]:
    """Yield the columns of a template. Raises ValueError if it is none."""
    for _, name, specification, conversion in string.Formatter().parse(template):
        if name is not None:
            yield f"{name}!{conversion}" if conversion else f"{name}:{specification}" if specification else name


def is_a_column(template: str) -> bool:
    """Return whether a template is the value of a column and nothing else."""
    return template.startswith("{") and template.endswith("}") and list(columns_of(template)) == [template[1:-1]]
