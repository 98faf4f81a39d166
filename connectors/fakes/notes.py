"""A small notes service, for the example connector: notebooks that hold notes, groups that may read notebooks.

    GET /notes?after=     {"notes": [...], "next": id | null}, a page, by id
    GET /notes/{id}       a note, or 404
    GET /changes?since=   {"ids": [...], "next": n}; without since: from now; 410: no longer known
    GET /groups           {"groups": [{"name", "members"}]}

All need ``Authorization: Bearer TOKEN``. Each change is sent as POST {"id": …}, with ``X-Notes-Signature``: the
HMAC-SHA256 of the body in hexadecimal.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from connectors.source import Request
from pipeline.runtime.http_server import served

TOKEN = "token-of-the-notes"  # noqa: S105 # opens nothing else
SECRET = "secret-of-the-notes"  # noqa: S105


@dataclass
class Note:
    id: str
    notebook: str
    title: str
    text: str
    revision: int

    def shown(self, restricted: set[str]) -> dict[str, Any]:
        return {
            "id": self.id,
            "notebook": self.notebook,
            "title": self.title,
            "text": self.text,
            "revision": self.revision,
            "restricted": self.notebook in restricted,
        }


@dataclass
class NotesService:
    """The notes and the faults. Each note that a test writes has a notebook of its own."""

    notes: dict[str, Note] = field(default_factory=dict)
    trash: dict[str, Note] = field(default_factory=dict)
    restricted: set[str] = field(default_factory=set)
    """Notebooks that only the board may read."""
    groups: dict[str, set[str]] = field(default_factory=lambda: {"staff": {"ann@acme.example"}, "board": set()})
    history: list[str] = field(default_factory=list)
    first_known_change: int = 0
    """The number of the first change that is still known."""
    throttled: int = 0
    failing: int = 0
    truncated: bool = False
    outbox: list[Request] = field(default_factory=list)
    writes: int = 0
    page_size: int = 3

    def record_change(self, id_: str) -> None:
        self.history.append(id_)
        body = json.dumps({"id": id_}).encode()
        signature = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        self.outbox.append(Request({"x-notes-signature": signature}, {}, body))

    def page(self, after: str) -> dict[str, Any]:
        ids = sorted(id_ for id_ in self.notes if id_ > after)
        notes = [self.notes[id_].shown(self.restricted) for id_ in ids[: self.page_size]]
        more = len(ids) > self.page_size and not self.truncated
        return {"notes": notes, "next": ids[self.page_size - 1] if more else None}


def app(service: NotesService) -> FastAPI:
    api = FastAPI(openapi_url=None)

    @api.middleware("http")
    async def trouble(request: HttpRequest, call_next: Any) -> Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": "unauthorized"}, 401)
        if service.throttled:
            service.throttled -= 1
            return JSONResponse({"error": "slow down"}, 429, {"Retry-After": "0"})
        if service.failing:
            service.failing -= 1
            return JSONResponse({"error": "our fault"}, 500)
        answer: Response = await call_next(request)
        return answer

    @api.get("/notes")
    async def notes(after: str = "") -> Mapping[str, Any]:
        return service.page(after)

    @api.get("/notes/{id_}")
    async def note(id_: str) -> Mapping[str, Any]:
        if id_ not in service.notes:
            raise HTTPException(404)
        return service.notes[id_].shown(service.restricted)

    @api.get("/changes")
    async def changes(since: int | None = None) -> Mapping[str, Any]:
        if since is not None and since < service.first_known_change:
            raise HTTPException(410)
        at = len(service.history) if since is None else since
        ids = service.history[at : at + service.page_size]
        return {"ids": ids, "next": at + len(ids)}

    @api.get("/groups")
    async def groups() -> Mapping[str, Any]:
        return {
            "groups": [{"name": name, "members": sorted(members)} for name, members in sorted(service.groups.items())]
        }

    return api


class NotesPlayground:
    inside, outside = "ann@acme.example", "eve@acme.example"

    def __init__(self, service: NotesService, url: str) -> None:
        self.service = service
        self.options: Mapping[str, Any] = {"url": url}
        self.environment: Mapping[str, str] = {"TOKEN": TOKEN, "SECRET": SECRET}

    async def write(self, name: str, text: str) -> str:
        self.service.writes += 1
        self.service.notes[name] = Note(name, f"notebook of {name}", f"Note {name}", text, self.service.writes)
        self.service.record_change(name)
        return name

    async def move(self, name: str) -> None:
        note = self.service.notes[name]
        note.title, note.revision = f"{note.title}, renamed", note.revision + 1
        self.service.record_change(name)

    async def remove(self, name: str) -> None:
        self.service.trash[name] = self.service.notes.pop(name)
        self.service.record_change(name)

    async def restore(self, name: str) -> None:
        self.service.notes[name] = self.service.trash.pop(name)
        self.service.record_change(name)

    async def restrict(self, name: str) -> None:
        """Restrict the note's notebook. As with most services, this sends no event."""
        self.service.restricted.add(f"notebook of {name}")

    async def leave(self) -> None:
        self.service.groups["staff"].discard(self.inside)

    def sent(self) -> Sequence[Request]:
        sent, self.service.outbox = self.service.outbox, []
        return sent

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        self.service.throttled, self.service.failing = throttled, failing
        self.service.truncated = truncated
        if expired:
            self.service.first_known_change = len(self.service.history)


@asynccontextmanager
async def playing() -> AsyncIterator[NotesPlayground]:
    service = NotesService()
    async with served(app(service)) as url:
        yield NotesPlayground(service, url)
