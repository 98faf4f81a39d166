"""The types of the fields of messages."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, StringConstraints, WithJsonSchema

MAX_TAGS = 1_000
MAX_GROUPS = 100_000
"""The most tags of a principal in one source."""
INT64_MAX = 2**63 - 1


def storable(text: str) -> str:
    """Refuse text that is not valid Unicode, and drop U+0000, which no store can hold and which carries no meaning."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds a lone surrogate, which is not Unicode text") from error
    return text.replace("\x00", "")


def _rfc3339(moment: object) -> object:
    """Refuse bare numbers, which may be seconds or milliseconds."""
    if isinstance(moment, datetime) or (isinstance(moment, str) and re.match(r"\d{4}-\d\d-\d\d[Tt ]", moment)):
        return moment
    raise ValueError("is no RFC 3339 time with an offset, such as 2026-01-31T08:30:00Z")


def _to_utc(moment: datetime) -> datetime:
    if not 1 < moment.year < 9999:  # the edges of the calendar overflow in some time zone
        raise ValueError("is outside the years 2 to 9998")
    return moment.astimezone(UTC)


Segment = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^/\x00]+$")]
"""A part of the Kafka key that may not hold ``/``: a tenant or a source."""
ExternalId = Annotated[str, StringConstraints(min_length=1, max_length=2_000, pattern=r"^[^\x00]+$")]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00]+$")]
Text = Annotated[str, AfterValidator(storable)]
Instant = Annotated[AwareDatetime, BeforeValidator(_rfc3339), AfterValidator(_to_utc)]
"""RFC 3339 with an offset, converted to UTC; digits beyond microseconds are cut off."""
Version = Annotated[
    int,
    Field(ge=0, le=INT64_MAX),
    # Decimal strings are for languages without 64-bit integers; nanoseconds do not fit in a double.
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": INT64_MAX},
                {"type": "string", "pattern": "^[0-9]{1,19}$"},
            ]
        }
    ),
]
Member = Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^/\x00]+$")]
"""A person, by the principal's name. It has no ``/``, because it is part of URLs and keys."""
AclTags = Annotated[list[Tag], Field(max_length=MAX_TAGS)]
RequiredTags = Annotated[list[Tag], Field(max_length=MAX_TAGS)]
Scalar = Text | int | float | bool
Metadata = dict[str, Scalar | list[Scalar] | None]


def sorted_unique(tags: list[str]) -> list[str]:
    return sorted(set(tags))
