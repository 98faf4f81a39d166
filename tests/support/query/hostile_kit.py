"""The query service among servers that can fall silent, and what it holds: to be counted before and after."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from aiohttp import web
from psycopg.conninfo import conninfo_to_dict

from pipeline.embedding.port import Vectors
from pipeline.runtime.settings import Settings
from query.embedding.embedders import QueryEmbedder
from query.http.serve import serving
from query.service import Service
from query.settings import ChatSettings, QuerySettings, ServeSettings
from tests.fakes.chat import FakeChat
from tests.support.pipeline.es_proxy import Proxy
from tests.support.query.http_kit import DEVELOPMENT, FEEDBACK, as_
from tests.support.query.library import WordEmbedder

BOUND_SECONDS = 30
"""Far above what any request is given here, and far below for ever."""
QUESTION = {"question": "Which tank does the pump in hall 7 feed?"}


class Elasticsearch(Proxy):
    """The real one, or silence."""

    silent = False
    waiting = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if not self.silent:
            return await super().handle(request)
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1
        raise AssertionError


class Model(WordEmbedder):
    """Answers, or does not."""

    def __init__(self) -> None:
        self.silent = False
        self.waiting = 0

    async def embed_query(self, text: str) -> Vectors:
        if self.silent:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1
        return await super().embed_query(text)


class World:
    """One service and everything around it, to be spoilt."""

    def __init__(self, service: Service, address: str, elastic: Elasticsearch, model: Model, chat: FakeChat) -> None:
        self.service = service
        self.address = address
        self.elastic = elastic
        self.model = model
        self.chat = chat
        settings = service.settings
        ledger = conninfo_to_dict(settings.postgres.dsn.get_secret_value())["port"]
        urls = (settings.elasticsearch.url, elastic.upstream, chat.url)
        self._ports = {int(ledger or 5432), *(urlsplit(url).port or 0 for url in urls)}

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=self.address, timeout=BOUND_SECONDS, headers=as_("ann")) as client:
            yield client

    async def search(self, client: httpx.AsyncClient, query: str, **options: Any) -> dict[str, Any]:
        answer = await client.post("/v1/search", json={"query": query, **options})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def stream(self, client: httpx.AsyncClient) -> AbstractAsyncContextManager[httpx.Response]:
        return client.stream("POST", "/v1/answers", json=QUESTION | {"stream": True})

    async def answers(self) -> None:
        """A search is answered whole, at last."""
        async with self.client() as client, asyncio.timeout(BOUND_SECONDS):
            while True:
                answer = (await client.post("/v1/search", json={"query": "pump in hall 3"})).json()
                if answer.get("results") and not answer["degraded"]:
                    return
                await asyncio.sleep(0.2)

    def census(self) -> dict[str, int]:
        """Count what a request could leave behind in this process. The pools may keep connections to other servers, up
        to their limits; of those, only the ones in use are counted."""
        process, stats, metrics = psutil.Process(), self.service.pool.get_stats(), self.service.metrics
        sockets = process.net_connections("tcp")
        pooled = [
            socket for socket in sockets if self._ports & {socket.laddr.port, socket.raddr.port if socket.raddr else 0}
        ]
        return {
            "tasks": sum(_is_ours(task) for task in asyncio.all_tasks()),
            "files": process.num_fds() - len(pooled),
            "in work": int(metrics.in_work._value.get()),
            "waiting": int(metrics.waiting._value.get()),
            "streams": int(metrics.streams._value.get()),
            "ledger": stats["pool_size"] - stats["pool_available"],
            "ledger's queue": stats["requests_waiting"],
            "keywords": self.elastic.waiting,
            "model": self.model.waiting,
            "chat": self.chat.stats.open,
        }

    @asynccontextmanager
    async def unharmed(self) -> AsyncIterator[None]:
        """After the body there is no more of anything than before, and the service answers."""
        await self.answers()
        before = self.census()
        yield
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                while self.more(before):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            names = Counter(task.get_name().split("-")[0] for task in asyncio.all_tasks())
            raise AssertionError(f"left behind: {self.more(before)}, tasks: {names}") from None
        await self.answers()

    @asynccontextmanager
    async def unharmed_after(self, mending: Callable[[], None]) -> AsyncIterator[None]:
        async with self.unharmed():
            yield
            mending()

    def more(self, before: dict[str, int]) -> dict[str, int]:
        return {what: now - before[what] for what, now in self.census().items() if now > before[what]}

    def restore(self) -> None:
        self.elastic.silent = self.model.silent = False
        self.chat.faults = type(self.chat.faults)()


def _is_ours(task: asyncio.Task[Any]) -> bool:
    """And not aiohttp's, which has one for each connection of the servers that stand around the service here."""
    return getattr(task.get_coro(), "__qualname__", "") != "RequestHandler.start"


@asynccontextmanager
async def surrounded(settings: Settings) -> AsyncIterator[World]:
    """A service on these stores, with a proxy before Elasticsearch, a model and a chat model that can fall silent."""
    elastic, model = Elasticsearch(settings.elasticsearch.url), Model()
    application = web.Application(client_max_size=2**26)
    application.router.add_route("*", "/{tail:.*}", elastic.handle)
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    through = settings.elasticsearch.model_copy(update={"url": url})
    async with FakeChat() as chat:
        query = QuerySettings(
            serve=ServeSettings(
                **DEVELOPMENT,
                port=0,
                requests_per_minute=1_000_000,
                search_seconds=6.0,
                body_seconds=1.0,
                concurrent=32,
                concurrent_per_caller=64,
            ),
            feedback=FEEDBACK,
            chat=ChatSettings(base_url=chat.url, model=chat.model, first_token_seconds=1.0, timeout_seconds=3.0),
        )
        everything = settings.model_copy(update={"elasticsearch": through})
        async with serving(everything, query, embedders=QueryEmbedder(lambda: model)) as (address, service):
            yield World(service, address, elastic, model, chat)
    await runner.cleanup()


async def to_the_end(world: World, sent: bytes) -> bytes:
    """Read the response until the service closes the connection, which it must."""
    reader, writer = await asyncio.open_connection(urlsplit(world.address).hostname, urlsplit(world.address).port)
    answered = b""
    with suppress(ConnectionError):  # closed before all that was sent is read
        writer.write(sent)
        async with asyncio.timeout(BOUND_SECONDS):
            while piece := await reader.read(4096):
                answered += piece
    writer.close()
    return answered
