"""The query service over a library of documents, as a real HTTP server in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

import httpx
from pydantic import SecretStr

from deploy.local.stack import Stack
from pipeline.runtime.home import DEVELOPMENT_FILE, development_token, made_development_token
from query.embedding.embedders import QueryEmbedder
from query.http.serve import serving
from query.service import Service
from query.settings import AuthSettings, FeedbackSettings, QuerySettings, ServeSettings
from tests.support.query.leak_paths import Paths
from tests.support.query.library import Library, WordEmbedder
from tests.support.space import KEY_ENDS

_FOLDER = TemporaryDirectory(prefix="penstock-token-")
TOKEN_FILE = Path(_FOLDER.name) / DEVELOPMENT_FILE
DEVELOPMENT = {"development": True, "development_token_file": TOKEN_FILE}
"""Settings of services in this process that run in development mode; ``as_`` knows their token."""
FEEDBACK_KEY = "the installation's key".replace(" ", "-").ljust(40, "x")
FEEDBACK = FeedbackSettings(keys=SecretStr(FEEDBACK_KEY))
READY_SECONDS = 60.0
"""Until the first answer of a model of words alone, on a machine however busy."""


@asynccontextmanager
async def service_over(
    library: Library,
    *,
    serve: dict[str, Any] | None = None,
    auth: dict[str, Any] | None = None,
    **parts: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """A client of a service on the library's stores, once the service has finished starting.

    Without ``auth`` it runs in development mode, where a client names itself by X-Penstock-As and X-Penstock-Tenant.
    ``parts`` are further parts of QuerySettings.
    """
    mode = DEVELOPMENT if auth is None else {}
    headers = bearer((serve or {}).get("development_token_file", TOKEN_FILE)) if auth is None else {}
    query = QuerySettings(
        serve=ServeSettings(port=0, **({"requests_per_minute": 100_000, **mode} | (serve or {}))),
        auth=AuthSettings(**(auth or {})),
        **({"feedback": FEEDBACK} | parts),
    )
    async with (
        serving(library.settings, query, embedders=QueryEmbedder(WordEmbedder)) as (address, service),
        httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as client,
    ):
        async with asyncio.timeout(READY_SECONDS):
            await service.following.warm.wait()
        yield client, service


async def events_of(answer: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """The names and data of an answer's events, as a browser reads them."""
    name = ""
    async for line in answer.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def write_keys(path: Path, **keys: dict[str, Any]) -> Path:
    """A file of API keys: by name, ``key`` in clear and the entry's other fields."""
    lines = []
    for name, fields in keys.items():
        lines += [f"[{json.dumps(name)}]", f"expires = {fields.get('expires', KEY_ENDS).isoformat()}"]
        for field, value in fields.items():
            if field == "expires":
                continue
            if field == "key":
                field, value = "sha256", sha256(value.encode()).hexdigest()
            lines.append(f"{field} = {json.dumps(value, ensure_ascii=False)}")  # which TOML takes as it is
    path.write_text("\n".join(lines) + "\n")
    return path


def token(file: Path = TOKEN_FILE) -> str:
    """Return the token of development mode."""
    made_development_token(file)
    return development_token(file)


def bearer(file: Path = TOKEN_FILE) -> dict[str, str]:
    """Headers of the local user, who runs a service in development mode."""
    return {"Authorization": f"Bearer {token(file)}"}


def as_(principal: str, tenant: str = "acme") -> dict[str, str]:
    """Headers of somebody else in development mode."""
    return {**bearer(), "X-Penstock-As": principal, "X-Penstock-Tenant": tenant}


@dataclass
class World:
    """One library, and the service over it in development mode."""

    library: Library
    paths: Paths
    client: httpx.AsyncClient
    service: Service

    async def id(self, tenant: str, external_id: str) -> UUID:
        [(rows,)] = await self.library.execute(
            "SELECT id FROM documents WHERE tenant = %s AND external_id = %s", tenant, external_id
        )
        return UUID(str(rows))


@asynccontextmanager
async def open_world(stack: Stack) -> AsyncIterator[World]:
    async with Paths.open(stack) as paths, service_over(paths.library) as (client, service):
        yield World(paths.library, paths, client, service)


def problem(answer: httpx.Response) -> tuple[int, str]:
    """Status and kind; every error has the shape of RFC 9457."""
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert set(body) <= {"type", "title", "status", "detail", "errors"}
    assert body["status"] == answer.status_code
    return answer.status_code, body["type"].removeprefix("urn:penstock:problem:")
