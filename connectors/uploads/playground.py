"""The playground of uploads for the contract suite: a client of the real HTTP API, served next to the instance."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from connectors.source import Request
from connectors.uploads.http import PATH, router
from connectors.uploads.intake import Intake
from connectors.uploads.store import Store, Table
from pipeline.core.errors import PenstockError
from pipeline.runtime.http_server import served
from pipeline.stores.postgres import Pool

MAX_BYTES = 1_000_000


class UploadsPlayground:
    inside = "ines@example.com"
    outside = "otto@example.com"
    environment: Mapping[str, str] = {}

    def __init__(self, folder: Path) -> None:
        self._store, self._members = folder / "originals", folder / "members.toml"
        self._members.write_text(f'[members]\nstaff = ["{self.inside}"]\n')
        self.options: Mapping[str, Any] = {
            "store": str(self._store),
            "members_file": str(self._members),
            "page_size": 3,
        }
        self._ids: dict[str, str] = {}
        """The upload's id by name."""
        self._texts: dict[str, str] = {}
        self._intake: Intake | None = None
        self.http = FastAPI()
        self.http.include_router(router(lambda _tenant: {"uploads": self._intake}, lambda: "of the playground"))
        self.client = httpx.AsyncClient()

    def placed(self, tenant: str, source: str, postgres: Pool) -> None:
        """Choose the instance that the playground changes."""
        store = Store(self._store)
        store.prepare()
        self._intake = Intake(Table(postgres, tenant, source), store, max_bytes=MAX_BYTES)

    async def write(self, name: str, text: str) -> str:
        self._texts[name] = text
        file = {"file": (f"{name}.txt", text.encode())}
        answer = await self._request(
            "POST", PATH, files=file, data={"external_id": f"pile/{name}", "acl_tags": "staff"}
        )
        self._ids[name] = answer["id"]
        return str(answer["external_id"])

    async def move(self, name: str) -> None:
        await self._request("PUT", f"{PATH}/{self._ids[name]}", data={"file_name": f"{name}, renamed.txt"})

    async def relabel(self, name: str) -> None:
        await self._request("PUT", f"{PATH}/{self._ids[name]}", data={"metadata": '{"labels": ["policy", "travel"]}'})

    async def remove(self, name: str) -> None:
        await self._request("DELETE", f"{PATH}/{self._ids[name]}")

    async def restore(self, name: str) -> None:
        await self.write(name, self._texts[name])

    async def restrict(self, name: str) -> None:
        await self._request("PUT", f"{PATH}/{self._ids[name]}", data={"acl_tags": "board"})

    async def leave(self) -> None:
        self._members.write_text("[members]\nstaff = []\n")

    def sent(self) -> Sequence[Request]:
        """Return no events: the API notifies the instance only within one process, and here the instance polls."""
        return ()

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """Do nothing: uploads depend on no service that could throttle, truncate or expire."""

    async def forgotten(self) -> None:
        if self._intake is not None:
            async with self._intake.table.pool.connection() as connection:
                await connection.execute(
                    "DELETE FROM uploads WHERE tenant = %s AND source = %s", self._intake.table.instance
                )

    async def _request(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.client.request(method, path, **body)
        if answer.status_code != httpx.codes.ACCEPTED:
            raise PenstockError(f"{method} {path} answers {answer.status_code}: {answer.json().get('detail')}")
        return dict(answer.json())


@asynccontextmanager
async def playing() -> AsyncIterator[UploadsPlayground]:
    with tempfile.TemporaryDirectory(prefix="penstock-uploads-") as folder:
        playground = UploadsPlayground(Path(folder))
        async with served(playground.http) as url, playground.client:
            playground.client.base_url = httpx.URL(url)
            try:
                yield playground
            finally:
                await playground.forgotten()
