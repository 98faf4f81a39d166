"""Real Airbyte sources of PyPI, run as programs: none of them was written by us."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from connectors.airbyte.source import Airbyte
from connectors.conform.memory_runner import InMemory, MemoryRunner
from connectors.declared import options
from connectors.set_aside import SetAside
from connectors.source import Context
from pipeline.runtime.http_server import served
from tests.contract.connectors.airbyte import fetch

pytestmark = pytest.mark.skipif(not fetch.IS_SUPPORTED, reason="the sources run on no Python after 3.12")

READERS = {"acl_tags": ["staff"], "members": {"staff": ["ann@acme.example"]}}


def runner(folder: Path, program: str, config: Mapping[str, Any], streams: Mapping[str, Any]) -> MemoryRunner:
    folder.mkdir(exist_ok=True)
    set_aside = SetAside()
    context = Context(name="real", tenant="t", memory=InMemory(), folder=folder, set_aside=set_aside)
    table = {"program": [str(fetch.program(program))], "streams": streams, **READERS}
    source = Airbyte(options(Airbyte, table, "real", {"PENSTOCK_REAL_CONFIG": json.dumps(config)}), context)
    return MemoryRunner(source, set_aside)


async def check(runner: MemoryRunner) -> list[str]:
    return [problem.message for problem in await runner.source.check()]


@pytest.mark.slow
async def test_faker_is_read_incrementally_with_nested_fields(tmp_path: Path) -> None:
    users = {
        "title": "{name}",
        "text": "{occupation} in {address.city}, {address.state}",
        "author": "{email}",
        "modified": "updated_at",
        "metadata": ["language"],
    }
    products = {"title": "{make} {model}", "text": "{year}", "sync": "full_refresh"}
    streams = {"users": users, "cars": {**products, "stream": "products"}}
    config = {"count": 7, "seed": 1, "parallelism": 1, "records_per_slice": 2, "always_updated": False}
    running = runner(tmp_path / "state", "source-faker", config, streams)
    try:
        assert await check(running) == []
        assert await running.full()
        first = dict(running.published)
        ann = first["users/1"]
        assert len([id_ for id_ in first if id_.startswith("users/")]) == 7
        assert len([id_ for id_ in first if id_.startswith("cars/")]) == 7
        assert " in " in ann.content
        assert "{" not in ann.content
        assert (ann.acl_tags, ann.source_modified_at is not None) == (["staff"], True)
        assert await running.changes()
        assert await running.sweep()
        assert running.published == first
        assert (running.deleted, running.status) == ([], "")
    finally:
        await running.source.close()
    more = runner(tmp_path / "state", "source-faker", {**config, "count": 9}, streams)
    try:
        cursor = await more.source.start()
        assert cursor is not None
        assert cursor["change"] == 7 + 7 + 2  # faker, handed its state, shows no user again, but two more cars
    finally:
        await more.source.close()


async def test_hardcoded_records_without_a_primary_key_need_a_declared_one(tmp_path: Path) -> None:
    customer = {"title": "{first_name} {last_name}", "text": "{note}, {addresses.city}"}
    keyless = runner(tmp_path, "source-hardcoded-records", {"count": 3}, {"customers": customer})
    try:
        assert "names no primary key" in "".join(await check(keyless))
    finally:
        await keyless.source.close()
    running = runner(tmp_path, "source-hardcoded-records", {"count": 3}, {"customers": {**customer, "id": ["id"]}})
    try:
        assert await running.full()
        assert await running.sweep()
        [document] = running.published.values()
        assert document.external_id.startswith("customers/")
        assert document.title == "New Test Customer"
        assert running.status == ""
    finally:
        await running.source.close()


@pytest.mark.slow
async def test_a_wrong_configuration_is_named_by_the_program(tmp_path: Path) -> None:
    running = runner(tmp_path, "source-faker", {"count": "many"}, {"users": {"title": "{name}", "text": "{email}"}})
    try:
        assert "is not of type 'integer'" in "".join(await check(running))
        assert not await running.full()
    finally:
        await running.source.close()


@dataclass
class Service:
    """An API of notes with pages, a token, and a filter by time of change."""

    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    token: str = "opens"
    requests: list[Mapping[str, str]] = field(default_factory=list)

    def put(self, id_: str, day: int, **values: Any) -> None:
        changed = f"2026-01-{day:02}T00:00:00Z"
        self.notes[id_] = {"id": id_, "title": id_.title(), "body": f"About {id_}.", "changed_at": changed, **values}

    async def answer(self, request: Request) -> JSONResponse:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"error": "who are you?"}, 401)
        query = dict(request.query_params)
        self.requests.append(query)
        since, start = query.get("since", ""), int(query.get("offset", 0))
        rows = sorted((n for n in self.notes.values() if n["changed_at"] >= since), key=lambda n: n["changed_at"])
        return JSONResponse({"notes": rows[start : start + 2]})


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, str]]:
    service = Service()
    async with served(Starlette(routes=[Route("/notes", service.answer)])) as url:
        yield service, url


def manifest(*, is_incremental: bool) -> dict[str, Any]:
    """Return a connector in Airbyte's declarative language."""
    cursor = {
        "type": "DatetimeBasedCursor",
        "cursor_field": "changed_at",
        "datetime_format": "%Y-%m-%dT%H:%M:%SZ",
        "start_datetime": "2026-01-01T00:00:00Z",
        "start_time_option": {"type": "RequestOption", "field_name": "since", "inject_into": "request_parameter"},
    }
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("id", "title", "body", "changed_at")},
    }
    stream = {
        "type": "DeclarativeStream",
        "name": "notes",
        "primary_key": ["id"],
        "schema_loader": {"type": "InlineSchemaLoader", "schema": schema},
        "retriever": {
            "type": "SimpleRetriever",
            "requester": {
                "type": "HttpRequester",
                "url_base": "{{ config['url'] }}",
                "path": "/notes",
                "authenticator": {"type": "BearerAuthenticator", "api_token": "{{ config['token'] }}"},
            },
            "record_selector": {
                "type": "RecordSelector",
                "extractor": {"type": "DpathExtractor", "field_path": ["notes"]},
            },
            "paginator": {
                "type": "DefaultPaginator",
                "page_token_option": {
                    "type": "RequestOption",
                    "field_name": "offset",
                    "inject_into": "request_parameter",
                },
                "pagination_strategy": {"type": "OffsetIncrement", "page_size": 2},
            },
        },
        **({"incremental_sync": cursor} if is_incremental else {}),
    }
    required = {"type": "object", "required": ["url", "token"], "properties": {}}
    return {
        "version": "6.5.0",
        "type": "DeclarativeSource",
        "check": {"type": "CheckStream", "stream_names": ["notes"]},
        "streams": [stream],
        "spec": {"type": "Spec", "connection_specification": required},
    }


NOTES = {"notes": {"title": "{title}", "text": "{body}"}}


def declarative(folder: Path, url: str, *, is_incremental: bool) -> MemoryRunner:
    config = {"url": url, "token": "opens", "__injected_declarative_manifest": manifest(is_incremental=is_incremental)}
    return runner(folder, "source-declarative-manifest", config, NOTES)


@pytest.mark.slow
async def test_a_declarative_connector_asks_its_service_for_what_is_new(
    tmp_path: Path, service: tuple[Service, str]
) -> None:
    notes, url = service
    for day, id_ in enumerate(("a", "b", "c"), 1):
        notes.put(id_, day)
    running = declarative(tmp_path, url, is_incremental=True)
    try:
        assert await running.full()
        assert set(running.published) == {"notes/a", "notes/b", "notes/c"}
        notes.put("b", 4, body="Edited.")
        notes.requests.clear()
        assert await running.changes()
        assert running.published["notes/b"].content == "Edited."
        assert {query["since"] for query in notes.requests} == {"2026-01-03T00:00:00Z"}
        assert running.status == ""
    finally:
        await running.source.close()


@pytest.mark.slow
async def test_a_declarative_connector_without_a_cursor_shows_what_is_gone(
    tmp_path: Path, service: tuple[Service, str]
) -> None:
    notes, url = service
    for day, id_ in enumerate(("a", "b", "c"), 1):
        notes.put(id_, day)
    running = declarative(tmp_path, url, is_incremental=False)
    try:
        assert await running.full()
        del notes.notes["b"]
        assert await running.sweep()
        assert (set(running.published), running.deleted) == ({"notes/a", "notes/c"}, ["notes/b"])
        notes.token = "another"
        assert not await running.sweep()
        assert set(running.published) == {"notes/a", "notes/c"}
        assert "opens" not in running.status
    finally:
        await running.source.close()
