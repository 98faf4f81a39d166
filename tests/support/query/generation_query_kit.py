"""Three generations over the same documents, each of a model of its own on a server of its own. Whoever
compares one model's vectors with another's finds nothing right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from deploy.local.stack import Stack
from pipeline.core.model import ChunkParams, EmbeddingService, Generation
from pipeline.embedding import choose
from pipeline.generations import lifecycle
from pipeline.generations.building import connect
from pipeline.ledger import generations
from pipeline.runtime.settings import EmbeddingSettings, Settings, dist
from pipeline.stores.elasticsearch import create_index
from pipeline.stores.graph import create_graph
from pipeline.stores.postgres import create_chunk_table
from query.embedding.embedders import GenerationEmbedders
from query.evaluation.place import assembled, empty
from query.http.serve import serving
from query.model import SearchResults
from query.service import Service
from query.settings import AuthSettings, QuerySettings, ServeSettings
from tests.fakes.openai import FakeOpenAI
from tests.support.query.http_kit import DEVELOPMENT, bearer
from tests.support.query.library import Event, Library, settings_on

DIMENSIONS = {"g1": 64, "g2": 48, "g3": 64}
"""Where they differ, the database refuses the other's vectors; where they do not, only the ranking would tell."""


PATIENT: dict[str, Any] = {"search_seconds": 300, "waiting_seconds": 60}
"""A busy machine is no failure."""


class Model(FakeOpenAI):
    """Each model puts the same texts elsewhere. A text in ``near`` lies where another one does. The title in the line
    before a passage changes nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(model=f"model-{name}", dimensions=DIMENSIONS[name], api_key=f"key-{name}")
        self.near: dict[str, str] = {}
        self.texts: list[str] = []
        self.open = asyncio.Event()
        """Cleared: whoever asks waits."""
        self.open.set()

    def vector(self, text: str, dimensions: int | None = None) -> NDArray[np.float32]:
        text = text.partition("\n")[2] or text
        return super().vector(f"{self.model} {self.near.get(text, text)}", dimensions)

    async def answer(self, request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        self.texts += [texts] if isinstance(texts, str) else texts
        await self.open.wait()
        return await super().answer(request)


@dataclass
class Site:
    """g1 is active, g2 previous and g3 being built, and all are complete, to begin with."""

    settings: Settings
    library: Library
    models: Mapping[str, Model]
    libraries: list[Library]

    @classmethod
    @asynccontextmanager
    async def create(
        cls, stack: Stack, params: Mapping[str, ChunkParams] = MappingProxyType({})
    ) -> AsyncIterator[Site]:
        """params: how generations chunk that do so in another way."""
        async with AsyncExitStack() as closing:
            models = {g: await closing.enter_async_context(Model(g)) for g in DIMENSIONS}
            embedding = _embedding(models)
            first = choose.embedder(embedding, dist() / "models")
            closing.push_async_callback(first.aclose)
            settings = settings_on(stack).model_copy(update={"embedding": embedding})
            name = f"gq{uuid4().hex[:10]}"
            own = await closing.enter_async_context(empty(settings, first, name, ChunkParams(200, 80, 254)))
            library = Library.over(own, first)
            there = [library]
            for n, state in (("g2", "previous"), ("g3", "building")):
                service = EmbeddingService("openai", models[n].url)
                generation = replace(
                    own.generation,
                    name=n,
                    state=state,
                    model=models[n].model,
                    dimensions=DIMENSIONS[n],
                    centred=False,
                    centre=None,
                    chunk_table=f"chunks_{n}",
                    keyword_index=f"{own.generation.keyword_index}-{n}",
                    params=params.get(n, own.generation.params),
                    service=service,
                )
                async with own.pool.connection() as connection:
                    await create_chunk_table(connection, generation)
                    await create_graph(connection, generation)
                    await generations.add(connection, generation)
                    await connection.execute(
                        "INSERT INTO builds (generation, origin, replaces, filled_at, ready_at)"
                        " VALUES (%s, 'g1', '{vectors,keywords}', now(), now())",
                        [n],
                    )
                await create_index(own.es, generation.keyword_index)
                closing.push_async_callback(own.es.indices.delete, index=generation.keyword_index)
                model = choose.for_generation(generation, embedding, dist() / "models")
                closing.push_async_callback(model.aclose)
                there.append(Library.over(assembled(own.settings, own.pool, own.es, generation, model), model))
            yield cls(own.settings, library, models, there)

    async def put(self, *events: Event) -> None:
        """Into the ledger, and into both stores of every generation."""
        ids = await self.library.accept(*events)
        for library in self.libraries:
            await library.converge(*ids)

    async def state(self, **states: str) -> None:
        """At once."""
        async with self.library.pool.connection() as connection:
            await connection.execute("UPDATE generations SET state = 'retired' WHERE name = ANY(%s)", [list(states)])
            for name, state in states.items():
                await connection.execute("UPDATE generations SET state = %s WHERE name = %s", [state, name])

    async def cut_over(self) -> str:
        """As the command does it. What that retires is taken for one that was built, so that there is a next time.
        Returns which is active now."""
        async with connect(self.settings.postgres, lock=False) as connection:
            done = await lifecycle.cutover(connection)
            for retired in done.retired:
                await connection.execute(
                    "INSERT INTO builds (generation, origin, replaces, filled_at, ready_at)"
                    " VALUES (%s, %s, '{vectors,keywords}', now(), now()) ON CONFLICT (generation)"
                    " DO UPDATE SET origin = excluded.origin",
                    [retired, done.active],
                )
                await connection.execute("UPDATE generations SET state = 'building' WHERE name = %s", [retired])
        return done.active

    async def roll_back(self) -> str:
        """As the command does it; what is being built is built to replace what is active then."""
        async with connect(self.settings.postgres, lock=False) as connection:
            active = (await lifecycle.rollback(connection)).active
            await connection.execute("UPDATE builds SET origin = %s", [active])
        return active

    async def generation(self, name: str) -> Generation:
        async with self.library.pool.connection() as connection:
            [matching] = [generation for generation in await generations.every(connection) if generation.name == name]
            return matching

    def environment(self, home: Path) -> dict[str, str]:
        """In which a command finds this place, after ``home`` was made to lead here; its own model is g1's."""
        self.library.write_home(home)
        embedding = self.settings.embedding
        keys = {host: key.get_secret_value() for host, key in embedding.api_keys.items()}
        return {
            "PENSTOCK_HOME": str(home),
            "PENSTOCK_EMBEDDING_PROVIDER": "openai",
            "PENSTOCK_EMBEDDING_MODEL": embedding.model,
            "PENSTOCK_EMBEDDING_DIMENSIONS": str(embedding.dimensions),
            "PENSTOCK_EMBEDDING_BASE_URL": self.models["g1"].url,
            "PENSTOCK_EMBEDDING_API_KEY": "key-g1",
            "PENSTOCK_EMBEDDING_API_KEYS": json.dumps(keys),
        }

    def embedders(self) -> GenerationEmbedders:
        return GenerationEmbedders.by_settings(self.settings.embedding, dist() / "models")

    @asynccontextmanager
    async def service(self, **parts: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
        """As it runs in production, with the models that the rows name. parts: of QuerySettings."""
        query = QuerySettings(
            serve=ServeSettings(
                port=0, requests_per_minute=100_000, concurrent_per_caller=32, **DEVELOPMENT, **PATIENT
            ),
            auth=AuthSettings(),
            **parts,
        )
        async with (
            serving(self.settings, query) as (address, service),
            httpx.AsyncClient(base_url=address, headers=bearer(), timeout=60) as client,
        ):
            yield client, service


def _embedding(models: Mapping[str, Model]) -> EmbeddingSettings:
    """g1's are the settings' own; the others' keys are known by their hosts."""
    return EmbeddingSettings(
        provider="openai",
        model=models["g1"].model,
        dimensions=DIMENSIONS["g1"],
        base_url=models["g1"].url,
        api_key="key-g1",
        api_keys={models[n].address.removeprefix("http://"): f"key-{n}" for n in ("g2", "g3")},
    )  # type: ignore[arg-type]


def names(response: SearchResults) -> list[str]:
    return [result.passage.external_id for result in response.results]
