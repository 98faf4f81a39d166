"""Errors of the client, and reading the service's own (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any

from pipeline.core.retry import retry_after_seconds

_KIND = "urn:penstock:problem:"
NOT_OURS = "this is not a response of Penstock: check the address of the service, and the proxy before it"
"""The detail of an error that another server has sent."""
LINE_CHARACTERS = 2_000


class ClientError(Exception):
    """A request that has no usable response. Its text is one line for people, without content of the request."""


class Unreachable(ClientError):
    """The service did not respond, or only with a part of a response: it refused the connection, closed it, or was
    silent for longer than the time limit."""


class InvalidResponse(ClientError):
    """The response is not what docs/openapi.json describes. Usually something other than Penstock responded."""


class TokenUnavailable(ClientError):
    """The file of the token cannot be read, or the token cannot be sent."""


@dataclass(frozen=True, slots=True)
class InvalidField:
    """A field of a request that the service refused."""

    pointer: str
    """JSON pointer into the request, such as ``/filters/since``."""
    detail: str


class ProblemError(ClientError):
    """The service responded with an error. docs/http.md lists the kinds."""

    def __init__(
        self,
        *,
        status: int,
        type: str,
        title: str,
        detail: str,
        errors: Sequence[InvalidField] = (),
        request_id: str | None = None,
        trace_id: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        """type: a URI; ``about:blank`` if another server responded, such as a proxy. request_id: as in
        the audit trail. trace_id: of the trace, if traces are on."""
        request = f" (request {request_id})" if request_id else ""
        super().__init__(f"{status} {title}{f': {detail}' if detail else ''}{request}")
        self.status = status
        self.type = type
        self.title = title
        self.detail = detail
        self.errors = tuple(errors)
        self.request_id = request_id
        self.trace_id = trace_id
        self.retry_after_seconds = retry_after_seconds

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, by which an error reaches another process. Its own way gives the constructor no names."""
        return partial(type(self), **{name: value for name, value in vars(self).items() if name[0] != "_"}), ()

    @property
    def kind(self) -> str:
        """The last part of Penstock's type, such as ``rate-limited``; "" for other types."""
        return self.type.removeprefix(_KIND) if self.type.startswith(_KIND) else ""


def problem(status: int, headers: Mapping[str, str], body: str | bytes) -> ProblemError:
    """The error that a response with a status from 400 stands for. headers: case-insensitive."""
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        read = None
    fields = read if isinstance(read, dict) and "type" in read else {}
    errors = fields.get("errors")
    invalid = [entry for entry in errors if isinstance(entry, dict)] if isinstance(errors, list) else []
    return ProblemError(
        status=status,
        type=_line(fields.get("type", "about:blank")),
        title=_line(fields.get("title") or _phrase(status)),
        detail=_line(fields.get("detail", "")) if fields else NOT_OURS,
        errors=[InvalidField(_line(entry.get("pointer", "")), _line(entry.get("detail", ""))) for entry in invalid],
        request_id=_line(headers["request-id"]) if "request-id" in headers else None,
        trace_id=_line(headers["trace-id"]) if "trace-id" in headers else None,
        retry_after_seconds=retry_after_seconds(headers, now=datetime.now(UTC)),
    )


def _line(value: object) -> str:
    """A value of another server, which may be of any type, as one line of at most LINE_CHARACTERS without control
    characters."""
    return "".join(char if char.isprintable() else " " for char in str(value)[:LINE_CHARACTERS])


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown status"
