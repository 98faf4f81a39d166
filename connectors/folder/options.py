"""Options of the folder connector."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from pipeline.core.errors import Misconfigured
from pipeline.core.model import Lane
from topics.messages import MAX_TAGS, Segment, Tag

_SEGMENT = TypeAdapter(Segment)
_TAG = TypeAdapter(Tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """acl_tags, required_tags: for every file of which no ``.penstock.toml`` says otherwise. Empty acl_tags: nobody."""

    acl_tags: tuple[str, ...]
    required_tags: tuple[str, ...] = ()
    tenant: str = "default"
    source: str = "folder"
    lane: Lane | None = None
    """None: changes go live; of files never seen, all but a few go to the backfill lane."""
    allow_mass_delete: bool = False
    scan_interval_seconds: float = 300.0
    """How often ``watch`` scans everything, whatever the operating system reported."""

    def __post_init__(self) -> None:
        """Raises Misconfigured."""
        for name in ("tenant", "source"):
            try:
                _SEGMENT.validate_python(getattr(self, name))
            except ValidationError as error:
                raise Misconfigured(f"{name} {getattr(self, name)!r}: 1 to 200 characters, none of them a /") from error
        for name in ("acl_tags", "required_tags"):
            object.__setattr__(self, name, tags(getattr(self, name), name))
        if not 0 < self.scan_interval_seconds <= 86_400:
            raise Misconfigured("scan_interval_seconds: more than 0, at most 86400")


def tags(values: object, what: str) -> tuple[str, ...]:
    """Return the tags sorted and unique, as messages carry them. Raises Misconfigured."""
    if not isinstance(values, list | tuple) or len(values) > MAX_TAGS:
        raise Misconfigured(f"{what}: a list of at most {MAX_TAGS} tags")
    try:
        return tuple(sorted({_TAG.validate_python(value, strict=True) for value in values}))
    except ValidationError as error:
        raise Misconfigured(f"{what}: every tag is text of 1 to 500 characters") from error
