"""A playground for a source of one's own: a dictionary of documents, which is served over HTTP or saved in a folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from connectors.conform.responses import Responses
from connectors.source import Request
from pipeline.runtime.http_server import served


class DeclaredMembers:
    """The part of a playground whose source knows no people: ``members_file`` says who holds the tag ``team``."""

    inside, outside = "ines@example.com", "otto@example.com"

    def __init__(self, members_file: Path) -> None:
        self.members_file = members_file
        self._write_members([self.inside])

    async def leave(self) -> None:
        self._write_members([])

    def sent(self) -> Sequence[Request]:
        """Return no requests: the source sends none."""
        return []

    def _write_members(self, members: Sequence[str]) -> None:
        self.members_file.write_text(f"team = {json.dumps(members)}\n")


STAFF, BOARD = "staff", "board"
TRUNCATED_DOCUMENTS = 3
"""The documents of a listing that ends early."""


@dataclass(slots=True)
class Sample:
    """A document as the service has it."""

    external_id: str
    title: str
    text: str
    revision: str = "1"
    """Another one after each change of title or text."""
    acl_tags: list[str] = field(default_factory=lambda: [STAFF])
    required_tags: list[str] = field(default_factory=list)
    changed_at: str = ""
    """When it was last changed, in RFC 3339, UTC."""


class Samples:
    """A ``connectors.source.Playground``. The service under test answers from ``documents``, ``listed`` and ``members``
    only, and keeps no state of its own."""

    inside, outside = "ines@example.com", "otto@example.com"

    def __init__(
        self,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        changed: Callable[[Samples], None],
        *,
        has_required_tags: bool = True,
    ) -> None:
        """changed: called after every change. has_required_tags: whether access is withdrawn by a required tag, rather
        than by other ``acl_tags``."""
        self.options, self.environment, self._changed = options, environment, changed
        self._has_required_tags = has_required_tags
        self.documents: dict[str, Sample] = {}
        """By external id."""
        self.members: dict[str, list[str]] = {STAFF: [self.inside], BOARD: []}
        """Principals by tag."""
        self.throttled = self.failing = 0
        self._is_truncated = False
        self._removed: dict[str, Sample] = {}
        self._writes = 0

    @property
    def listed(self) -> list[Sample]:
        """The documents that a listing shows, by external id: only the first few while listings end early."""
        documents = [self.documents[external_id] for external_id in sorted(self.documents)]
        return documents[:TRUNCATED_DOCUMENTS] if self._is_truncated else documents

    async def write(self, name: str, text: str) -> str:
        sample = self.documents.setdefault(name, Sample(name, name.title(), text))
        self._writes += 1
        sample.text, sample.revision = text, str(self._writes)
        self._note_change(name)
        return name

    async def move(self, name: str) -> None:
        sample = self.documents[name]
        self._writes += 1
        sample.title, sample.revision = f"{sample.title}, renamed", str(self._writes)
        self._note_change(name)

    async def remove(self, name: str) -> None:
        self._removed[name] = self.documents.pop(name)
        self._changed(self)

    async def restore(self, name: str) -> None:
        self.documents[name] = self._removed.pop(name)
        self._note_change(name)

    async def restrict(self, name: str) -> None:
        if self._has_required_tags:
            self.documents[name].required_tags = [BOARD]
        else:
            self.documents[name].acl_tags = [BOARD]
        self._note_change(name)

    async def leave(self) -> None:
        self.members[STAFF].remove(self.inside)
        self._changed(self)

    def sent(self) -> Sequence[Request]:
        return []

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """expired: without effect, because a service that is read by ``list`` and ``read`` issues no cursors."""
        self.throttled, self.failing, self._is_truncated = throttled, failing, truncated
        self._changed(self)

    def _note_change(self, name: str) -> None:
        self.documents[name].changed_at = datetime.now(UTC).isoformat(timespec="microseconds")
        self._changed(self)


def _nothing(_samples: Samples) -> None:
    return None


def _at(url: str) -> Mapping[str, Any]:
    return {"url": url}


@asynccontextmanager
async def over_http(
    answer: Callable[[Samples, str, Mapping[str, str]], Any] | Mapping[str, Any],
    options: Callable[[str], Mapping[str, Any]] = _at,
    environment: Mapping[str, str] | None = None,
    *,
    has_required_tags: bool | None = None,
) -> AsyncIterator[Samples]:
    """Serve the samples over HTTP.

    answer: the JSON of each response by the path of its GET request, with names in braces where the samples belong:
    ``{external_id}``, ``{title}``, ``{text}``, ``{revision}``, ``{changed_at}``, ``{acl_tags}`` and ``{required_tags}``
    of a document, or ``{acl_tag}``, its only one, as text; ``{tag}`` and ``{members}`` of a group. A list with such a
    document or group in it has an item for each; a path may name one by ``{external_id}`` or ``{tag}``. With
    ``?PARAMETER={next}`` in the path, a listing has pages, and ``{next}`` in its response is what requests the next
    one, or null; with ``?PARAMETER={since}`` it has what was changed at that time or later. Outside of a group,
    ``{members}`` is an object of all members by tag. Or a function that returns the JSON for a path and query; None is
    answered with 404.

    options: the instance's options for a service at this address, by default ``url``. environment: its secrets by
    variable, by default ``TOKEN``. has_required_tags: False for a service without restrictions beyond who may read a
    document: ``required_tags`` then stays empty; by default it is true, unless the responses do not name them.
    Throttled and failing requests are answered with 429 and 500. Raises ValueError for an unknown name in braces, and
    for an array within a text.
    """
    if isinstance(answer, Mapping):
        responses = Responses(answer)
        answer = responses.answer
        if has_required_tags is None:
            has_required_tags = "required_tags" in responses.names

    async def respond(request: HttpRequest) -> Response:
        if samples.throttled:
            samples.throttled -= 1
            return Response(status_code=429, headers={"Retry-After": "0"})
        if samples.failing:
            samples.failing -= 1
            return Response(status_code=500)
        value = answer(samples, request.url.path, dict(request.query_params))
        return JSONResponse(value) if value is not None else Response(status_code=404)

    async with served(Starlette(routes=[Route("/{path:path}", respond)])) as url:
        secrets = {"TOKEN": "opens-nothing-else"} if environment is None else environment
        samples = Samples(options(url), secrets, _nothing, has_required_tags=has_required_tags is not False)
        yield samples


@asynccontextmanager
async def in_folder(
    save: Callable[[Samples, Path], None],
    options: Callable[[Path], Mapping[str, Any]],
    environment: Mapping[str, str] | None = None,
    *,
    has_required_tags: bool = True,
) -> AsyncIterator[Samples]:
    """Save the samples in a temporary folder.

    save: called at the beginning and after every change, writes the samples to files. It writes ``documents``: a file
    that lacks documents no longer has them, so no listing of it ends early; nor is a folder throttled. options: the
    instance's options for this folder. ``members.toml`` in it holds the members, for ``members_file``. environment,
    has_required_tags: as for ``over_http``.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-samples-") as name:
        folder = Path(name)

        def changed(samples: Samples) -> None:
            lines = [f"{tag} = {json.dumps(members)}\n" for tag, members in samples.members.items()]
            (folder / "members.toml").write_text("".join(lines))
            save(samples, folder)

        samples = Samples(options(folder), environment or {}, changed, has_required_tags=has_required_tags)
        changed(samples)
        yield samples
