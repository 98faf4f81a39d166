"""Uploads that are slow, or read together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from connectors.portions import in_portions
from connectors.uploads.http import receive, router
from connectors.uploads.intake import Invalid
from connectors.uploads.source import Uploads
from connectors.uploads.store import Upload


class Slow:
    """A table whose database answers slowly."""

    def __init__(self) -> None:
        self.waiting = self.most = 0

    async def record_start(self, external_ids: list[str]) -> None: ...

    async def record_end(self, upload: Upload, code: str | None, problem: str | None) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        try:
            await asyncio.sleep(0.2)
        finally:
            self.waiting -= 1


async def test_texts_that_wait_for_the_database_count_towards_the_memory_of_their_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty texts waited to be recorded before any of them was counted, each of up to 16 MiB."""
    monkeypatch.setattr("connectors.room.MAX_HELD_BYTES", 1_000_000)
    (tmp_path / "text").write_text("word " * 80_000)
    table: Any = Slow()
    source = Uploads.__new__(Uploads)
    source.intake = SimpleNamespace(table=table)  # type: ignore[assignment]
    source._store = SimpleNamespace(path=lambda _: tmp_path / "text")  # type: ignore[assignment]
    now = datetime.now(UTC)
    rows = [
        Upload(
            id=uuid4(),
            external_id=str(n),
            version=1,
            file_name=f"{n}.txt",
            media_type="text/plain",
            title=None,
            sha256="",
            size=400_000,
            acl_tags=["staff"],
            required_tags=[],
            metadata={},
            received_at=now,
            modified_at=now,
            changed=n,
            extracting_at=None,
            extracted_at=None,
            problem_code=None,
            problem=None,
            deleted_at=None,
        )
        for n in range(12)
    ]
    async for _, entries in in_portions(rows, source._entries):
        assert len(entries) <= 3
    assert table.most <= 3


async def test_a_file_that_arrives_very_slowly_gives_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the least speed of the port, sixteen files of 50 MB held all places of an instance for three hours."""
    monkeypatch.setattr("connectors.uploads.http.ARRIVAL_SECONDS", 0.1)
    places = ["the last one"]

    @contextmanager
    def writing() -> Any:
        place = places.pop()
        try:
            yield SimpleNamespace(write=lambda _: None, size=0, max_bytes=1_000)
        finally:
            places.append(place)

    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.Event().wait()

    intake: Any = SimpleNamespace(writing=writing, max_bytes=1_000)
    app = FastAPI()
    app.include_router(router(lambda _: {"files": intake}, lambda: "acme"))
    async with asyncio.timeout(20), AsyncClient(transport=ASGITransport(app), base_url="http://here") as client:
        answer = await client.post("/v1/uploads", content=body())
    assert (answer.status_code, answer.headers["connection"]) == (408, "close")
    assert places == ["the last one"]


async def test_a_file_full_of_its_forms_boundary_is_refused_at_its_beginning() -> None:
    """The parser looks at each byte of it: a file of 50 MB took the worker of all connectors eight seconds."""
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
    read = list[int]()

    async def arriving() -> AsyncIterator[bytes]:
        yield head
        for n in range(100):
            read.append(n)
            yield b"\r\n--bX" * 10_000
        yield b"\r\n--b--\r\n"

    file: Any = SimpleNamespace(size=0, max_bytes=10**9, write=lambda part: None)
    form: Any = SimpleNamespace(headers={"content-type": "multipart/form-data; boundary=b"}, stream=arriving)
    with pytest.raises(Invalid, match="its boundary is in its file"):
        await receive(form, file)
    assert read == [0]


@pytest.mark.parametrize(
    ("tags", "reason"), [(3_000, None), (3_001, "more than 3000 fields"), (5_000, "more than 3000 fields")]
)
async def test_a_form_of_too_many_tags_is_refused_for_its_fields(tags: int, reason: str | None) -> None:
    """The error spoke of the boundary, which no sender of a form knows. A line break before the first boundary, as some
    clients send it, cost one of the fields."""
    tag = b'\r\n--b\r\nContent-Disposition: form-data; name="acl_tags"\r\n\r\nstaff'

    async def arriving() -> AsyncIterator[bytes]:
        yield tag * tags + b"\r\n--b--\r\n"

    file: Any = SimpleNamespace(size=0, max_bytes=10**9)
    form: Any = SimpleNamespace(headers={"content-type": "multipart/form-data; boundary=b"}, stream=arriving)
    if reason is None:
        assert len((await receive(form, file)).fields["acl_tags"]) == tags
        return
    with pytest.raises(Invalid, match=reason):
        await receive(form, file)
